"""Part d: what the router adds to the first token and to every later one.

The same number of streams is sent to a decode worker directly and through a router that knows
only this worker, in turn; every prompt is new.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from kvrelay.bench.config import BenchConfig, Prompts
from kvrelay.bench.rows import Row
from kvrelay.bench.streams import Burst, run

STREAMS = (1, 16, 64)
PROMPT_TOKENS = 32
NEW_TOKENS = 32
TIMES = 3


def rows(config: BenchConfig, router: str, worker: str, prompts: Prompts) -> Iterator[Row]:
    """Two rows for every number of streams: per request (first token) and per token."""
    for streams in STREAMS:
        through, direct = _in_turn(config, router, worker, prompts, streams)
        name = f"{streams} stream{'s' if streams > 1 else ''}"
        first = (median(map(_first, through)) * 1e3, median(map(_first, direct)) * 1e3)
        gap = (median(map(_gap, through)) * 1e3, median(map(_gap, direct)) * 1e3)
        for what, (routed, straight) in (("first token", first), ("a token", gap)):
            yield Row(
                part="d",
                name=f"{what}, {name}",
                unit="ms",
                ours=routed,
                rival=straight,
                against="directly to the worker",
                note=f"router adds {routed - straight:.2f} ms",
            )


def _in_turn(
    config: BenchConfig, router: str, worker: str, prompts: Prompts, streams: int
) -> tuple[list[Burst], list[Burst]]:
    through, direct = [], []
    for turn in range(TIMES * config.times + 1):
        routed = run("router", router, prompts.many(streams, PROMPT_TOKENS), NEW_TOKENS)
        straight = run("decode", worker, prompts.many(streams, PROMPT_TOKENS), NEW_TOKENS)
        if turn:  # the first one warms up
            through.append(routed)
            direct.append(straight)
    return through, direct


def _first(burst: Burst) -> float:
    return median(line.first for line in burst.lines)


def _gap(burst: Burst) -> float:
    return median((line.whole - line.first) / max(1, len(line.gaps)) for line in burst.lines)
