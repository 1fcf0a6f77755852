"""Part b: time to the first token when the prompt is unknown, here already, or in the store.

Sent to the prefill workers directly: the first one computes a prompt and gets it again, the second
one has never seen it and finds it in the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks.cluster.config import ClusterBenchConfig, RandomPrompts
from benchmarks.cluster.rows import BenchRow
from benchmarks.cluster.streams import Timeline, run

LENGTHS = (64, 128, 256, 512, 1024, 2048)


def rows(
    config: ClusterBenchConfig, workers: Sequence[str], prompts: RandomPrompts, longest: int
) -> Iterator[BenchRow]:
    """Two rows for every length: a local hit and a store hit, each against cold."""
    first, second = workers
    for length in (length for length in LENGTHS if length < longest):
        _three(first, second, prompts.draw(length))  # a first time at this length is slower
        taken = [_three(first, second, prompts.draw(length)) for _ in range(config.times)]
        cold = median(lines[0].first for lines in taken) * 1e3
        for place, kind in ((1, "local hit"), (2, "store hit")):
            yield BenchRow(
                part="b",
                name=f"first token, {length:,} tokens, {kind}",
                unit="ms",
                ours=median(lines[place].first for lines in taken) * 1e3,
                rival=cold,
                against="cold",
                note=_found(taken[-1][place]),
            )


def _three(first: str, second: str, prompt: list[int]) -> tuple[Timeline, Timeline, Timeline]:
    """Cold, local hit, store hit of one prompt; each waits until its blocks are saved."""
    cold = run("prefill", first, [prompt], 2).lines[0]
    local = run("prefill", first, [prompt], 2).lines[0]
    store = run("prefill", second, [prompt], 2).lines[0]
    return cold, local, store


def _found(line: Timeline) -> str:
    leg = line.legs[0] if line.legs else None
    if leg is None:
        return "no usage"
    return f"{leg.local} local, {leg.external} external, {leg.computed} computed"
