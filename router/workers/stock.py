"""An unmodified ``vllm serve`` as a decode worker: tokens in, tokens out over its HTTP API.

No process of ours runs beside it: it shares no KV with the store and computes every prompt. Its
revision is a name of its own, so streams never continue between it and a worker of kvrelay.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import NotRequired, TypedDict

from kvrelay.errors import DeadlineExceeded, Mismatch, Rejected, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.protocol import PROTOCOL, Role
from kvrelay.rpc.security.policy import installed
from kvrelay.rpc.status import NothingListens
from kvrelay.rpc.tracing import Metadata
from kvrelay.v1 import decode_pb2, prefill_pb2, types_pb2, worker_pb2
from kvrelay.version import VLLM, tested_vllm
from router.workers.health import WorkerLost
from router.workers.link import LegStream
from router.workers.sources import HTTP
from router.workers.stock_http import exchange
from router.workers.stock_rules import request_of

BLOCK = 16  # in which its size is reported: it does not tell its own
ROLE = types_pb2.ROLE_DECODE
FINISHES = {
    "stop": types_pb2.FINISH_REASON_STOP,
    "length": types_pb2.FINISH_REASON_LENGTH,
    None: types_pb2.FINISH_REASON_UNSPECIFIED,
}


class StockLink:
    """A ``WorkerLink``. ``model`` is the router's model folder, ``seeded`` its --stock-seeds."""

    def __init__(self, url: str, model: str, name: str, seeded: bool) -> None:
        self._address = url.removeprefix(HTTP)
        self._config = Path(model) / "config.json"
        self._name = name
        self._seeded = seeded
        self._boot = ""
        self.connected = False

    async def load(self, deadline: Deadline) -> worker_pb2.WorkerLoad:
        await self._read("/health", deadline)
        return worker_pb2.WorkerLoad(worker_id=self._boot)

    async def info(self, deadline: Deadline) -> worker_pb2.WorkerInfo:
        version = json.loads(await self._read("/version", deadline))["version"]
        if not tested_vllm(version):
            raise Mismatch("version", f"vLLM {version} was not tested as a worker, {VLLM} was")
        await self._read("/inference/v1/abort_requests", deadline, {"request_ids": []})
        models = json.loads(await self._read("/v1/models", deadline))["data"]
        served = next((model for model in models if model["id"] == self._name), None)
        if served is None:
            raise Mismatch("namespace.model", f"it does not serve {self._name!r}")
        revision, numerics = f"stock:{served['root']}", f"stock-vllm-{version}"
        space = worker_pb2.Namespace(
            model=self._name,
            revision=revision,
            layout="stock",
            dtype="auto",
            block_size=BLOCK,
            format_version=1,
            digest=hashlib.sha256(f"{revision}\0{numerics}".encode()).digest(),
            numerics=numerics,
        )
        config = json.loads(self._config.read_text(encoding="utf-8"))
        return worker_pb2.WorkerInfo(
            worker_id=self._boot,
            role=ROLE,
            started_as=ROLE,
            namespace=space,
            num_blocks=-(-served["max_model_len"] // BLOCK),
            max_model_len=served["max_model_len"],
            vocab_size=config.get("text_config", config)["vocab_size"],
            version=f"vllm {version}",
            protocol=PROTOCOL,
            fleet_key_id=installed().credentials.fleet_key_id,
            numeric_profile=numerics,
        )

    async def serving(self, role: Role, deadline: Deadline) -> bool:
        return role == ROLE  # it answered ``load``

    def prefill(
        self, request: prefill_pb2.PrefillRequest, timeout: float, metadata: Metadata
    ) -> LegStream[prefill_pb2.PrefillResponse]:
        raise Mismatch("role", "unmodified vLLM is a decode worker only")

    def decode(
        self, request: decode_pb2.DecodeRequest, timeout: float, metadata: Metadata
    ) -> LegStream[decode_pb2.DecodeResponse]:
        return StockCall(_responses(self._address, request.leg, self._boot, self._seeded), timeout)

    async def close(self) -> None:
        return

    async def _read(self, path: str, deadline: Deadline, body: object = None) -> str:
        """A page. Once nothing listens, the next process to answer gets another boot token."""
        try:
            async with asyncio.timeout(deadline.remaining()):
                async with exchange(self._address, path, body) as reply:
                    text = b"\n".join([line async for line in reply.lines()]).decode()
            if reply.status == 403:
                raise Mismatch("server", "start it with --enable-scale-out")
            if reply.status != 200:
                raise Unavailable(f"{self._address}{path}: status {reply.status}")
        except NothingListens:
            self.connected = False
            raise
        if not self.connected:
            self._boot = secrets.token_hex(16)
            self.connected = True
        return text


class StockCall:
    """A leg on such a server: a ``LegStream``."""

    def __init__(
        self, responses: AsyncGenerator[decode_pb2.DecodeResponse], timeout: float
    ) -> None:
        self._responses = responses
        self._deadline = Deadline.after(timeout)
        self._next = asyncio.ensure_future(anext(responses, None))

    async def initial_metadata(self) -> None:
        """The server does not tell when the leg has arrived: returns at once."""

    def done(self) -> bool:
        return True  # nothing is learned from when ``initial_metadata`` returns

    def cancel(self) -> bool:
        return self._next.cancel()

    async def __aiter__(self) -> AsyncIterator[decode_pb2.DecodeResponse]:
        try:
            async with aclosing(self._responses), asyncio.timeout(self._deadline.remaining()):
                while (response := await self._next) is not None:
                    yield response
                    self._next = asyncio.ensure_future(anext(self._responses, None))
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed before the output was complete") from error


async def _responses(
    address: str, leg: types_pb2.Leg, boot: str, seeded: bool
) -> AsyncGenerator[decode_pb2.DecodeResponse]:
    """The tokens of a leg, then its account. Leaving it makes vLLM abort the request."""
    begun, first, generated, usage = time.monotonic(), 0.0, 0, None
    async with exchange(address, "/inference/v1/generate", request_of(leg, seeded)) as reply:
        async for line in reply.lines():
            if reply.status != 200:
                raise _refused(address, reply.status, line.decode(errors="replace"))
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if error := event.get("error"):
                raise _refused(address, error["code"], error["message"])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if choice["finish_reason"] not in FINISHES:
                    raise Unavailable(f"{address} ended a leg: {choice['finish_reason']}")
                first = first or time.monotonic() - begun
                places = (choice["logprobs"] or {}).get("content")
                tokens = _tokens(choice["token_ids"], places, leg.sampling.logprobs)
                generated += len(tokens)
                yield decode_pb2.DecodeResponse(
                    tokens=tokens, finish_reason=FINISHES[choice["finish_reason"]]
                )
    if usage is None:
        raise WorkerLost(f"{address} ended a leg early")
    account = types_pb2.LegUsage(worker_id=boot, role=ROLE, generated=generated, run_seconds=first)
    _add_hits(account, leg, usage.get("prompt_tokens_details"))
    yield decode_pb2.DecodeResponse(usage=account)


class _Place(TypedDict):
    token_id: int
    logprob: float
    top_logprobs: NotRequired[list[_Place]]


def _tokens(
    ids: Sequence[int], places: Sequence[_Place] | None, count: int
) -> list[types_pb2.Token]:
    """The tokens of an event, with the ``count`` likeliest candidates of each if they are told."""
    if places is None:
        return [types_pb2.Token(id=token) for token in ids]
    tokens = []
    for place in places:
        ranked = sorted(place["top_logprobs"], key=lambda one: -one["logprob"])
        chosen, *top = map(_logprob, (place, *ranked[:count]))
        logprobs = types_pb2.Logprobs(chosen=chosen, top=top)
        tokens.append(types_pb2.Token(id=chosen.token_id, logprobs=logprobs))
    return tokens


def _logprob(one: _Place) -> types_pb2.TokenLogprob:
    return types_pb2.TokenLogprob(token_id=one["token_id"], logprob=one["logprob"])


def _add_hits(
    account: types_pb2.LegUsage, leg: types_pb2.Leg, details: Mapping[str, int] | None
) -> None:
    """A server tells its cache hits with ``--enable-prompt-tokens-details`` only."""
    if details is None:
        account.lost = True
        account.admission_unknown = True
        return
    length, hits = len(leg.prompt_token_ids) + len(leg.output_token_ids), details["cached_tokens"]
    decoded = max(account.generated - 1, 0)
    account.length = length
    account.local = hits
    account.computed = length - hits
    account.executed = length - hits + decoded
    account.admissions.add(
        epoch=1, length=length, local=hits, fresh=length - hits, frontier=length + decoded
    )


def _refused(address: str, status: int, text: str) -> Rejected | Unavailable:
    said = f"{address} answered {status}: {text[:500]}"
    return Rejected("sampling", said) if 400 <= status < 429 else Unavailable(said)
