"""Streams of a client that always resumes: the tokens it received, and when."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TypedDict

from kvrelay import AsyncClient
from kvrelay.errors import KvrelayError, Unavailable
from kvrelay.usage import Usage

PATIENCE = 100.0
RETRY_SECONDS = 0.05
REFUSAL = "workers died while they served this request"
VOCAB = 256  # no special token in prompts


class Parameters(TypedDict, total=False):
    """Sampling of a stream."""

    token_ids: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class Query:
    """A prompt and how to answer it; ``seed`` is ``None`` for greedy."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None

    @property
    def parameters(self) -> Parameters:
        """As the client library takes it."""
        parameters = Parameters(token_ids=self.prompt, max_tokens=self.max_tokens, ignore_eos=True)
        if self.seed is None:
            return {**parameters, "temperature": 0.0}
        return {**parameters, "temperature": 0.8, "top_p": 0.95, "seed": self.seed}


def draw(chance: random.Random, count: int, prompt: int, max_tokens: int) -> list[Query]:
    """Fresh prompts; every other one is sampled."""
    return [
        Query(
            tuple(chance.randrange(VOCAB) for _ in range(prompt)),
            max_tokens,
            chance.randrange(1 << 32) if index % 2 else None,
        )
        for index in range(count)
    ]


@dataclass(slots=True)
class Stream:
    """One response stream. ``broken`` counts errors after which the client resumed, ``refused`` the
    refusals of a poison request among them. ``told``: the client knew the hits at the last
    error."""

    query: Query
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    usage: Usage | None = None
    broken: int = 0
    refused: int = 0
    told: bool = False

    async def run(self, client: AsyncClient, may_break: bool, may_refuse: bool = False) -> None:
        """Read to the end; resume after ``Unavailable`` if it ``may_break``, else raise."""
        deadline = time.monotonic() + PATIENCE
        call = client.generate(timeout=PATIENCE, **self.query.parameters)
        while True:
            try:
                async for chunk in call:
                    self.tokens += chunk.token_ids
                    self.times += [time.monotonic()] * len(chunk.token_ids)
                    self.usage = chunk.usage or self.usage
                return
            except KvrelayError as error:
                refused = REFUSAL in str(error)
                allowed = may_refuse if refused else may_break and isinstance(error, Unavailable)
                if not allowed or time.monotonic() > deadline:
                    raise
                self.refused += refused
            self.broken += 1
            self.told = call.continued().HasField("cached_prompt_tokens")
            await asyncio.sleep(RETRY_SECONDS)
            call = client.resume(call, timeout=PATIENCE)

    def pause_after(self, moment: float) -> float:
        """The longest time without a token from ``moment`` on, in seconds.

        Tokens that were on their way may still arrive at first, so it is not the wait for the next.
        """
        after = [moment, *(seen for seen in self.times if seen > moment)]
        return max((later - one for one, later in pairwise(after)), default=0.0)

    def check_usage(self, known: bool = False) -> None:
        """Every token is in the account of exactly one leg of the last call.

        Unless its prompt was ``known`` before, it has the hits of an undisturbed run, none. Or it
        says that it does not know them, if it was never told: a leg was lost before its admission
        reached the router, or the stream broke before its first message.
        """
        usage = self.usage
        assert usage is not None
        assert usage.prompt_tokens == len(self.query.prompt)
        assert usage.completion_tokens == self.query.max_tokens
        for leg in usage.legs:  # lost ones too, as of their admission
            assert leg.length == leg.local + leg.external + leg.computed, leg
            assert (leg.length == 0) == leg.admission_unknown == (not leg.admissions), leg
            assert leg.lost >= leg.admission_unknown, leg
            assert leg.length or not leg.generated, leg
        runs = [run for leg in usage.legs for run in leg.admissions]
        spans = [range(run.local + run.external, run.frontier) for run in runs]
        distinct = len(set(chain(*spans)))
        assert usage.recomputed == sum(map(len, spans)) - distinct, usage
        if not self.broken:
            assert sum(leg.generated for leg in usage.legs) == len(self.tokens)
            first = next(leg for leg in usage.legs if leg.length)
            unheard = usage.legs.index(first) > 0
            hit = first.local + first.external
            assert usage.cached_prompt_tokens in ((hit, None) if unheard else (hit,)), usage
        if not known:
            assert usage.cached_prompt_tokens in ((0,) if self.told else (0, None)), usage


async def run_all(address: str, streams: list[Stream], may_break: bool = False) -> None:
    """Run all streams at once, over one connection."""
    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(stream.run(client, may_break))


def undisturbed(address: str, queries: list[Query]) -> list[list[int]]:
    """The tokens of an undisturbed cluster."""
    streams = [Stream(query) for query in queries]
    asyncio.run(run_all(address, streams))
    return [stream.tokens for stream in streams]
