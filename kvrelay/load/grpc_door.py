"""The door of a kvrelay router: gRPC, whose usage has the account of every leg."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from kvrelay.client.aio import AsyncClient
from kvrelay.errors import KvrelayError, Unavailable
from kvrelay.load.http_door import DoorOptions
from kvrelay.load.request import AnswerPiece, LoadRequest, ServerAccount
from kvrelay.usage import LegUsage, Usage


class GrpcDoor:
    """One router; each tenant has a connection of its own."""

    def __init__(self, address: str, options: DoorOptions) -> None:
        self._address = address
        self._options = options
        self._clients: dict[str, AsyncClient] = {}

    async def ask(self, request: LoadRequest, timeout: float) -> AsyncGenerator[AnswerPiece, None]:  # noqa: ASYNC109 - the call's deadline
        options, ids = self._options, request.ids()
        text = request.text() if ids is None and not options.chat else None
        stream = self._client(request.tenant).generate(
            token_ids=ids,
            prompt=text,
            messages=request.messages() if options.chat else None,
            model=options.model or None,
            max_tokens=request.max_tokens,
            temperature=options.temperature,
            seed=request.seed,
            ignore_eos=options.ignore_eos,
            timeout=timeout,
        )
        async with aclosing(stream):
            async for chunk in stream:
                usage = None if chunk.usage is None else account_of(chunk.usage)
                at = time.perf_counter()
                yield AnswerPiece(at, chunk.text, chunk.token_ids, chunk.finish_reason, usage)

    async def probe(self) -> None:
        """Raises ``Unavailable`` if no router answers."""
        try:
            await self._client("").fleet()
        except Unavailable:
            raise
        except KvrelayError:
            return  # it answers, and refuses this caller its list

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    def _client(self, tenant: str) -> AsyncClient:
        """Without a token of its own a tenant has what this process has installed."""
        if tenant not in self._clients:
            token = self._options.tokens.get(tenant)
            self._clients[tenant] = AsyncClient(self._address, token=token)
        return self._clients[tenant]


def account_of(usage: Usage) -> ServerAccount:
    """The prompt's sources are those of its first leg; a further leg of a role is a migration.

    A leg that was lost before its admission arrived has no sources, and is not the first.
    """
    sources = {}
    first = next((leg for leg in usage.legs if not leg.admission_unknown), None)
    if first is not None:
        sources = {"local": first.local, "external": first.external, "computed": first.computed}
    roles = Counter(leg.role for leg in usage.legs)
    return ServerAccount(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        sources=sources,
        queue_seconds=usage.queue_seconds,
        migrations=sum(count - 1 for count in roles.values()),
        faults=tuple(fault for leg in usage.legs for fault in _faults(leg)),
    )


def _faults(leg: LegUsage) -> Iterator[str]:
    """What is wrong with a leg. Only one that was lost before its admission arrived has none."""
    figures = (leg.local, leg.external, leg.computed, leg.executed, leg.generated)
    if leg.admission_unknown:
        if not leg.lost or any((*figures, leg.length, *leg.admissions)):
            yield f"a leg has figures without an admission: {leg}"
    elif leg.length < 1 or leg.length != sum(figures[:3]):
        yield f"the sources of a leg do not add up to its length: {leg}"
