"""Routes to send streams to an engine or through a door, and what one round of a route costs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import median
from typing import ClassVar
from urllib.parse import urlsplit

from benchmarks.cluster.streams import Burst, Endpoint, Timeline, run

NEW_TOKENS = 64
VOCABULARY = 256
EVENT = b"data: {"
DONE = b"data: [DONE]"
Prompts = Sequence[Sequence[int]]
Pairs = Sequence[tuple[float, float]]
"""Seconds to the first token, and from there to the last one, of each stream."""
Ask = Callable[[Prompts, int], Pairs]


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds of one round."""

    NAMES: ClassVar = (
        "first token, added",
        "a token, added",
        "a request, processor",
        "a token, processor",
    )
    first: float
    token: float
    request_cost: float
    token_cost: float

    def added(self, engine: Figures) -> tuple[float, ...]:
        """The four figures of a door, in the order of ``NAMES``."""
        latency = replace(self, first=self.first - engine.first, token=self.token - engine.token)
        return astuple(latency)


@dataclass(frozen=True, slots=True)
class MeasuredRoute:
    """To an engine; or through a door, with the process of the door and the engine behind it."""

    name: str
    ask: Ask
    pid: int | None = None
    engine: str = ""

    def measure(self, prompts: Callable[[], Prompts]) -> Figures:
        """One round: requests of one token, then of ``NEW_TOKENS``."""
        streams = len(prompts())
        before = self._spent()
        self.ask(prompts(), 1)
        between = self._spent()
        pairs = self.ask(prompts(), NEW_TOKENS)
        short, long = (between - before), (self._spent() - between)
        first, rest = zip(*pairs, strict=True)
        return Figures(
            first=median(first) * 1e3,
            token=median(rest) * 1e3 / (NEW_TOKENS - 1),
            request_cost=short * 1e3 / streams,
            token_cost=(long - short) * 1e3 / (NEW_TOKENS - 1) / streams,
        )

    def _spent(self) -> float:
        """Processor seconds of the door's process so far."""
        return 0.0 if self.pid is None else time.clock_gettime(_processor_clock(self.pid))


def _processor_clock(pid: int) -> int:
    """The clock of clock_getcpuclockid(3) on Linux: all threads of a process."""
    return ~pid << 3 | 2


def run_grpc(endpoint: Endpoint, address: str) -> Ask:
    """To a worker, or through the router's gRPC door."""
    return lambda prompts, count: _pairs(run(endpoint, address, prompts, count))


def run_vllm(url: str) -> Ask:
    """Through ``vllm serve``: each of its events has a token."""
    return lambda prompts, count: _pairs(_run_events(url, prompts, count))


def run_http(url: str) -> Ask:
    """Through our HTTP door: its last event has the finish reason only."""

    def ask(prompts: Prompts, count: int) -> Pairs:
        lines = _run_events(url, prompts, count).lines
        return _pairs(Burst(tuple(replace(line, stamps=line.stamps[:-1]) for line in lines)))

    return ask


def _pairs(burst: Burst) -> Pairs:
    return [(line.first, line.whole - line.first) for line in burst.lines]


def _run_events(url: str, prompts: Prompts, count: int) -> Burst:
    """Send all prompts at once, each on a connection that is open already; stamp each event."""
    return asyncio.run(_burst(url, prompts, count))


async def _burst(url: str, prompts: Prompts, count: int) -> Burst:
    split = urlsplit(url)
    opened = [await asyncio.open_connection(split.hostname, split.port) for _ in prompts]
    pairs = zip(opened, prompts, strict=True)
    lines = await asyncio.gather(*(_one(*ends, prompt, count) for ends, prompt in pairs))
    return Burst(tuple(lines))


async def _one(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    prompt: Sequence[int],
    count: int,
) -> Timeline:
    asked = {"prompt": list(prompt), "max_tokens": count, "temperature": 0, "stream": True}
    body = json.dumps({**asked, "ignore_eos": True, "return_token_ids": True}).encode()
    sent = time.perf_counter()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    stamps: list[float] = []
    before = b""
    while DONE not in before:
        data = await reader.read(1 << 16)
        if not data:
            raise SystemExit(f"the stream ended early: {before[-500:]!r}")
        stamps += [time.perf_counter()] * data.count(EVENT)
        before = before[-len(DONE) :] + data
    writer.close()
    return Timeline(sent, tuple(stamps), (), ())
