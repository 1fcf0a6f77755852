"""Part b: time to the first token when the prompt is unknown, here already, or in the store.

Sent to the prefill workers directly: the first one computes a prompt and gets it again, the second
one has never seen it and finds it in the store. Just before, each worker answers another prompt:
one that was idle for seconds finds caches, and pages of its files, taken by others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks.cluster.config import ClusterBenchConfig, RandomPrompts
from benchmarks.cluster.rows import BenchRow
from benchmarks.cluster.streams import Timeline, run

LENGTHS = (64, 128, 256, 512, 1024, 2048)
OTHER = 32  # tokens of the prompt before


def rows(
    config: ClusterBenchConfig, workers: Sequence[str], prompts: RandomPrompts, longest: int
) -> Iterator[BenchRow]:
    """Two rows for every length: a local hit and a store hit, each against cold."""
    first, second = workers
    for length in (length for length in LENGTHS if length < longest):
        _three(first, second, prompts, length)  # a first time at this length is slower
        taken = [_three(first, second, prompts, length) for _ in range(config.times)]
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


def _three(
    first: str, second: str, prompts: RandomPrompts, length: int
) -> tuple[Timeline, Timeline, Timeline]:
    """Cold, local hit, store hit of one prompt; each waits until its blocks are saved."""
    prompt = prompts.draw(length)

    def line(worker: str) -> Timeline:
        run("prefill", worker, [prompts.draw(OTHER)], 2)
        return run("prefill", worker, [prompt], 2).lines[0]

    return line(first), line(first), line(second)


def _found(line: Timeline) -> str:
    leg = line.legs[0] if line.legs else None
    if leg is None:
        return "no usage"
    return f"{leg.local} local, {leg.external} external, {leg.computed} computed"
