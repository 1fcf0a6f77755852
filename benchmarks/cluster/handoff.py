"""Part c: the gap between token 0 (of the prefill worker) and token 1 (of the decode worker)."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, median

from benchmarks.cluster.config import ClusterBenchConfig, RandomPrompts
from benchmarks.cluster.rows import BenchRow
from benchmarks.cluster.streams import run

LENGTHS = (64, 512, 1024)
NEW_TOKENS = 32
TIMES = 5


def rows(config: ClusterBenchConfig, router: str, prompts: RandomPrompts) -> Iterator[BenchRow]:
    """One row for every length: the handoff against the usual gap after it.

    The usual gap is the median over runs of each run's mean: two tokens that arrive in one
    message have no gap of their own.
    """
    for length in map(config.scaled, LENGTHS):
        run("router", router, [prompts.draw(length)], NEW_TOKENS)
        bursts = [
            run("router", router, [prompts.draw(length)], NEW_TOKENS)
            for _ in range(TIMES * config.times)
        ]
        lines = [burst.lines[0] for burst in bursts]
        legs = lines[-1].legs
        yield BenchRow(
            part="c",
            name=f"token 0 to token 1, {length:,}-token prompt",
            unit="ms",
            ours=median(line.gaps[0] for line in lines) * 1e3,
            rival=median(mean(line.gaps[1:]) for line in lines) * 1e3,
            against="usual later gap",
            note=f"{legs[-1].external} transferred" if len(legs) > 1 else "one leg only",
        )
