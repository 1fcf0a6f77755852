"""Eviction policies on families of requests, and on parts of a trace where one is given.

    python -m benchmarks.evict [--trace TRACE] [--requests 3000] [--seed 1]

Prints hit rates of LRU, of ``returns`` and of the offline optimum, in blocks.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.workloads import FAMILIES, bursts, eager, requests
from kvstore.index.eviction import make_policy
from kvstore.trace.optimum import optimum
from kvstore.trace.requests import TraceRequest, read_trace
from kvstore.trace.simulate import replay

SMALL = (eager, bursts)
"""For stores that hold a few prompts."""

Named = tuple[str, list[TraceRequest], tuple[int, ...]]


def families(count: int, seed: int) -> Iterator[Named]:
    """Each of them, and the budgets to try."""
    for family in FAMILIES:
        budgets = (30, 100) if family in SMALL else (200, 1000)
        yield family.__name__, requests(family(random.Random(seed), count)), budgets


def parts(trace: Sequence[TraceRequest]) -> Iterator[Named]:
    """Of a recorded trace: its halves, half of its conversations, faster and slower."""
    middle, small, large = len(trace) // 2, (1000,), (1000, 10_000)
    half = [one for one in trace if one.names[1:2] and one.names[1][0] % 2]
    yield "first half", list(trace[:middle]), large
    yield "second half", list(trace[middle:]), large
    yield "half of the conversations", half, small
    yield "four times as fast", [replace(one, at=one.at / 4) for one in trace[:middle]], small
    yield "four times as slow", [replace(one, at=one.at * 4) for one in trace[:middle]], small


def main(argv: Sequence[str]) -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evict", description=__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    named = list(families(options.requests, options.seed))
    if options.trace is not None:
        named += parts(list(read_trace(options.trace)))
    print("| requests | blocks | LRU | returns | optimum |\n|---|--:|--:|--:|--:|")
    for name, trace, budgets in named:
        for budget in budgets:
            plain, ours = (replay(trace, budget, make_policy(one)) for one in ("lru", "returns"))
            best = optimum(trace, budget)
            rates = f"{plain.rate:.2%} | {ours.rate:.2%} | {best.rate:.2%}"
            print(f"| {name} | {budget:,} | {rates} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
