"""Eviction policies on families of requests, and a study on recorded traces.

    python -m benchmarks.evict [--requests 3000] [--seed 1]
    python -m benchmarks.evict --trace TRACE [--budgets 1000,5000] [--variants]
    python -m benchmarks.evict --trace TRACE --hints [--budgets 1000,5000] [--horizon 60]

Prints hit rates of LRU, of ``returns`` and of the offline optimum, in blocks. For a trace it also
prints the way: how much of what the optimum has over LRU ``returns`` has. ``--variants`` adds the
halves of the trace by conversation, each with half of the budgets, and the trace with the starts
of its conversations drawn anew, the times within each kept. A policy that was tuned on one of them
must hold on the others. ``--hints`` prints the way of ``returns`` with hints from a router's queue
and from clients (``benchmarks.hinted`` says what is assumed).
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from benchmarks.hinted import Assumed, hinted_rate
from benchmarks.workloads import FAMILIES, bursts, eager, requests
from kvstore.index.eviction import make_policy
from kvstore.limits import LRU, RETURNS
from kvstore.trace.optimum import optimum
from kvstore.trace.requests import TraceRequest, read_trace
from kvstore.trace.simulate import replay

SMALL = (eager, bursts)
"""For stores that hold a few prompts."""

SHARED = 200
"""A first block of more requests than this is a system prompt: the second tells them apart."""

BUDGETS = (1000, 2000, 5000, 10_000)

Trace = Sequence[TraceRequest]


@dataclass(frozen=True, slots=True)
class StudyRow:
    """Hit rates in a store of ``blocks``."""

    name: str
    blocks: int
    lru: float
    returns: float
    optimum: float

    @property
    def way(self) -> float | None:
        """The share of the way from LRU to the optimum; ``None`` if there is none."""
        room = self.optimum - self.lru
        return (self.returns - self.lru) / room if room > 0.001 else None

    def __str__(self) -> str:
        rates = " | ".join(f"{rate:.2%}" for rate in (self.lru, self.returns, self.optimum))
        way = "" if self.way is None else f"{self.way:.0%}"
        return f"| {self.name} | {self.blocks:,} | {rates} | {way} |"


def measured(name: str, trace: Trace, blocks: int) -> StudyRow:
    """One row."""
    lru, returns = (replay(trace, blocks, make_policy(one)).rate for one in (LRU, RETURNS))
    return StudyRow(name, blocks, lru, returns, optimum(trace, blocks).rate)


def with_hints(trace: Trace, budgets: Sequence[int], horizon: float) -> Iterator[StudyRow]:
    """``returns`` without hints, with each kind of hint, and with both."""
    cases = (
        Assumed(wait=10.0),
        Assumed(wait=30.0),
        Assumed(horizon=horizon),
        Assumed(wait=30.0, horizon=horizon),
        Assumed(horizon=math.inf),
    )
    for blocks in budgets:
        plain = measured("no hints", trace, blocks)
        yield plain
        for case in cases:
            yield replace(plain, name=str(case), returns=hinted_rate(trace, blocks, case))


def families(count: int, seed: int) -> Iterator[tuple[str, Trace, tuple[int, ...]]]:
    """Each of them, and the budgets to try."""
    for family in FAMILIES:
        budgets = (30, 100) if family in SMALL else (200, 1000)
        yield family.__name__, requests(family(random.Random(seed), count)), budgets


def halves(trace: Trace, seed: int) -> tuple[Trace, Trace]:
    """The trace in two parts by conversation."""
    chance = random.Random(seed)
    first: dict[bytes, bool] = {}
    parts: tuple[list[TraceRequest], list[TraceRequest]] = ([], [])
    for request, key in zip(trace, conversations_of(trace), strict=True):
        if key not in first:
            first[key] = chance.random() < 0.5
        parts[first[key]].append(request)
    return parts


def drawn_anew(trace: Trace, seed: int) -> Trace:
    """The trace with new starts of its conversations, in a new order, over the same time."""
    chance = random.Random(seed)
    groups: dict[bytes, list[TraceRequest]] = {}
    for request, key in zip(trace, conversations_of(trace), strict=True):
        groups.setdefault(key, []).append(request)
    order = list(groups.values())
    chance.shuffle(order)
    gap = max(group[0].at for group in order) / len(order)
    start = 0.0
    moved: list[TraceRequest] = []
    for group in order:
        start += chance.expovariate(1 / gap)
        moved += [replace(one, at=one.at - group[0].at + start) for one in group]
    return sorted(moved, key=lambda one: one.at)


def conversations_of(trace: Trace) -> Iterator[bytes]:
    """For each request a block that its conversation has to itself and begins with."""
    uses: dict[bytes, int] = {}
    for request in trace:
        for name in request.names[:1]:
            uses[name] = uses.get(name, 0) + 1
    for request in trace:
        shared = uses.get(request.names[0], 0) > SHARED if request.names else False
        yield next(iter(request.names[shared and len(request.names) > 1 :]), b"")


def study(trace: Trace, budgets: Sequence[int], variants: bool, seed: int) -> Iterator[StudyRow]:
    """The rows of one trace, then those of its variants."""
    named = [("the trace", trace, list(budgets))]
    if variants:
        smaller = [budget // 2 for budget in budgets]
        named += [(f"half {n}", part, smaller) for n, part in enumerate(halves(trace, seed), 1)]
        named.append(("drawn anew", drawn_anew(trace, seed), list(budgets)))
    for name, part, blocks in named:
        for budget in blocks:
            yield measured(name, part, budget)


def main(argv: Sequence[str]) -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--hints", action="store_true")
    parser.add_argument("--horizon", type=float, default=60.0)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    print("| requests | blocks | LRU | returns | optimum | of the way |\n|---|--:|--:|--:|--:|--:|")
    rows: Iterable[StudyRow]
    if options.trace is None:
        rows = (
            measured(name, trace, budget)
            for name, trace, budgets in families(options.requests, options.seed)
            for budget in budgets
        )
    else:
        trace = list(read_trace(options.trace))
        budgets = [int(one) for one in options.budgets.split(",")]
        rows = study(trace, budgets, options.variants, options.seed)
        if options.hints:
            rows = with_hints(trace, budgets, options.horizon)
    shares: dict[str, list[float]] = {}
    for row in rows:
        print(row, flush=True)
        if row.way is not None:
            shares.setdefault(row.name, []).append(row.way)
    if options.trace is not None:
        for name, found in shares.items():
            print(f"{name}: {fmean(found):.1%} of the way on average")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
