"""Part c: the gap between token 0 (of the prefill worker) and token 1 (of the decode worker)."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from kvrelay.bench.config import BenchConfig, Prompts
from kvrelay.bench.rows import Row
from kvrelay.bench.streams import run

LENGTHS = (64, 512, 1024)
NEW_TOKENS = 32
TIMES = 5


def rows(config: BenchConfig, router: str, prompts: Prompts) -> Iterator[Row]:
    """One row for every length: the hand-over against the median of the later gaps."""
    for length in map(config.scaled, LENGTHS):
        run("router", router, [prompts.draw(length)], NEW_TOKENS)
        bursts = [
            run("router", router, [prompts.draw(length)], NEW_TOKENS)
            for _ in range(TIMES * config.times)
        ]
        gaps = [burst.lines[0].gaps for burst in bursts]
        legs = bursts[-1].lines[0].legs
        yield Row(
            part="c",
            name=f"token 0 to token 1, {length:,}-token prompt",
            unit="ms",
            ours=median(each[0] for each in gaps) * 1e3,
            rival=median(gap for each in gaps for gap in each[1:]) * 1e3,
            against="median later gap",
            note=f"{legs[-1].external} transferred" if len(legs) > 1 else "one leg only",
        )
