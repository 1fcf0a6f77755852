"""Part d: what the router adds to the first token and to every later one, beside a bare gRPC relay.

The same number of streams is sent through a router that knows only one decode worker, through the
relay, and to the worker directly, in turn; every prompt is new. Then the processor time of router
and relay is read from the system: other load on the machine hardly changes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from benchmarks.cluster.config import ClusterBenchConfig, RandomPrompts
from benchmarks.cluster.relay import relay
from benchmarks.cluster.rows import BenchRow
from benchmarks.cluster.streams import Burst, Endpoint, run

STREAMS = (1, 16, 64)
PROMPT_TOKENS = 32
NEW_TOKENS = 32
TIMES = 3
LONG, SHORT = 129, 1  # tokens of an answer; the difference is what tokens cost
BURSTS = 4
Route = tuple[Endpoint, str]


def rows(
    config: ClusterBenchConfig, router: str, pid: int | None, worker: str, prompts: RandomPrompts
) -> Iterator[BenchRow]:
    """Two rows for every number of streams: per request (first token) and per token; then CPU."""
    with relay(worker) as between:
        routes: tuple[Route, ...] = (("router", router), ("decode", between.address))
        for streams in STREAMS:
            every = (*routes, ("decode", worker))
            bursts = _in_turn(TIMES * config.times, every, prompts, streams)
            name = f"{streams} stream{'s' if streams > 1 else ''}"
            yield _row(f"first token, {name}", bursts, _first)
            yield _row(f"a token, {name}", bursts, _gap)
        if pid is not None and Path("/proc/self/stat").exists():
            yield from _processor(dict(zip((pid, between.pid), routes, strict=True)), prompts)


def _row(name: str, bursts: list[list[Burst]], what: Callable[[Burst], float]) -> BenchRow:
    routed, relayed, straight = (median(map(what, one)) * 1e3 for one in bursts)
    return BenchRow(
        part="d",
        name=name,
        unit="ms",
        ours=routed,
        rival=straight,
        against="directly to the worker",
        note=f"router adds {routed - straight:.2f} ms, a bare relay {relayed - straight:.2f} ms",
    )


def _in_turn(
    times: int, routes: tuple[Route, ...], prompts: RandomPrompts, streams: int
) -> list[list[Burst]]:
    bursts: list[list[Burst]] = [[] for _ in routes]
    for turn in range(times + 1):
        for (endpoint, address), made in zip(routes, bursts, strict=True):
            burst = run(endpoint, address, prompts.many(streams, PROMPT_TOKENS), NEW_TOKENS)
            if turn:  # the first one warms up
                made.append(burst)
    return bursts


def _first(burst: Burst) -> float:
    return median(line.first for line in burst.lines)


def _gap(burst: Burst) -> float:
    return median((line.whole - line.first) / max(1, len(line.gaps)) for line in burst.lines)


def _processor(routes: dict[int, Route], prompts: RandomPrompts) -> Iterator[BenchRow]:
    """Milliseconds of processor time, a request and a token, at the most streams."""
    requests, tokens = [], []
    for pid, (endpoint, address) in routes.items():
        short, long = (_spent(pid, endpoint, address, prompts, count) for count in (SHORT, LONG))
        tokens.append((long - short) / (LONG - SHORT))
        requests.append(short)
    for what, (ours, bare) in (("request", requests), ("token", tokens)):
        yield BenchRow(
            part="d",
            name=f"processor time a {what}, {STREAMS[-1]} streams",
            unit="ms",
            ours=ours,
            rival=bare,
            against="a bare relay",
            note=f"router takes {ours - bare:.3f} ms more",
        )


def _spent(pid: int, endpoint: Endpoint, address: str, prompts: RandomPrompts, count: int) -> float:
    """Milliseconds a stream."""
    streams = STREAMS[-1]
    before = processor_seconds(pid)
    for _ in range(BURSTS):
        run(endpoint, address, prompts.many(streams, PROMPT_TOKENS), count)
    return (processor_seconds(pid) - before) * 1e3 / (BURSTS * streams)


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
