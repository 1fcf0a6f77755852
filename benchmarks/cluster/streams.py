"""Streams of requests with a time for every token: through the router, or straight to a worker.

Greedy, to the requested length. Times are the client's, from just before it sends.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

import grpc

from kvrelay.errors import Unavailable
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)

SECONDS = 1800.0
SAMPLING = types_pb2.Sampling(temperature=0.0, ignore_eos=True)
Endpoint = Literal["router", "prefill", "decode"]
Legs = tuple[types_pb2.LegUsage, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request as its client saw it; ``stamps`` are the arrival of each token, by the clock."""

    sent: float
    stamps: tuple[float, ...]
    tokens: tuple[int, ...]
    legs: Legs

    @property
    def first(self) -> float:
        return self.stamps[0] - self.sent

    @property
    def whole(self) -> float:
        return self.stamps[-1] - self.sent

    @property
    def gaps(self) -> tuple[float, ...]:
        return tuple(b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False))


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that were sent at once."""

    lines: tuple[Timeline, ...]

    @property
    def seconds(self) -> float:
        return max(line.stamps[-1] for line in self.lines) - min(line.sent for line in self.lines)


def run(endpoint: Endpoint, address: str, prompts: Sequence[Sequence[int]], count: int) -> Burst:
    """Send all prompts at once and wait for ``count`` tokens of each."""
    return asyncio.run(_burst(endpoint, address, prompts, count))


async def _burst(
    endpoint: Endpoint, address: str, prompts: Sequence[Sequence[int]], count: int
) -> Burst:
    async with open_channel(address) as channel:
        digest = await _connect(endpoint, channel)
        lines = await asyncio.gather(
            *(_one(endpoint, channel, prompt, count, digest) for prompt in prompts)
        )
    return Burst(tuple(lines))


async def _connect(endpoint: Endpoint, channel: grpc.aio.Channel) -> bytes:
    """Open the connection before any clock runs; returns the namespace of a worker."""
    async with asyncio.timeout(30):
        await channel.channel_ready()
    if endpoint == "router":
        return b""
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    answer = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=30)
    return answer.info.namespace.digest


async def _one(
    endpoint: Endpoint, channel: grpc.aio.Channel, prompt: Sequence[int], count: int, digest: bytes
) -> Timeline:
    sent = time.perf_counter()
    stamps: list[float] = []
    tokens: list[int] = []
    legs: Legs = ()
    try:
        async for new, usage in _events(endpoint, channel, prompt, count, digest):
            stamps += [time.perf_counter()] * len(new)
            tokens += new
            legs += usage
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    if not stamps:
        raise Unavailable(f"{endpoint}: the stream ended without a token")
    return Timeline(sent, tuple(stamps), tuple(tokens), legs)


def _events(
    endpoint: Endpoint, channel: grpc.aio.Channel, prompt: Sequence[int], count: int, digest: bytes
) -> AsyncIterator[tuple[list[int], Legs]]:
    if endpoint == "router":
        return _through_router(channel, prompt, count)
    leg = types_pb2.Leg(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=prompt,
        max_tokens=count,
        sampling=SAMPLING,
        namespace_digest=digest,
    )
    return _at_prefill(channel, leg) if endpoint == "prefill" else _at_decode(channel, leg)


async def _through_router(
    channel: grpc.aio.Channel, prompt: Sequence[int], count: int
) -> AsyncIterator[tuple[list[int], Legs]]:
    ids = router_pb2.TokenIds(ids=prompt)
    request = router_pb2.GenerateRequest(token_ids=ids, max_tokens=count, sampling=SAMPLING)
    async for answer in router_pb2_grpc.RouterServiceStub(channel).Generate(
        request, timeout=SECONDS
    ):
        yield [token.id for token in answer.tokens], tuple(answer.usage.legs)


async def _at_decode(
    channel: grpc.aio.Channel, leg: types_pb2.Leg
) -> AsyncIterator[tuple[list[int], Legs]]:
    request = decode_pb2.DecodeRequest(leg=leg)
    async for answer in decode_pb2_grpc.DecodeServiceStub(channel).Decode(request, timeout=SECONDS):
        legs = (answer.usage,) if answer.HasField("usage") else ()
        yield [token.id for token in answer.tokens], legs


async def _at_prefill(
    channel: grpc.aio.Channel, leg: types_pb2.Leg
) -> AsyncIterator[tuple[list[int], Legs]]:
    request = prefill_pb2.PrefillRequest(leg=leg)
    async for answer in prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(
        request, timeout=SECONDS
    ):
        tokens = [answer.first_token.token.id] if answer.HasField("first_token") else []
        yield tokens, (answer.usage,) if answer.HasField("usage") else ()
