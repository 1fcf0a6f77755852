"""Eviction policies on families of requests, and a study on recorded traces.

    python -m benchmarks.evict [--hard] [--requests 3000] [--seed 1] [--repeat 8]
    python -m benchmarks.evict --trace TRACE[:1000,5000] [--trace ...] [--variants] [--seeds 2]
    python -m benchmarks.evict --trace TRACE:1249 --hints [--horizon 60]
    python -m benchmarks.evict --trace TRACE:1000,5000 --trace OTHER:750,1500 --folds 2

Prints hit rates of LRU, of ``returns`` and of the offline optimum, in blocks, and the way: how much
of what the optimum has over LRU ``returns`` has. ``--hard`` takes the families that are hard for a
policy that learns. ``--repeat`` makes each family from so many seeds and prints the differences to
LRU on the same requests, in points: their mean, two standard errors of it, the worst and the best.
``--variants`` adds the halves of each trace by
conversation, each with half of the budgets, and ``--seeds`` times the trace with the starts of its
conversations drawn anew, the times within each kept. The last table has for each of them the mean
way and the worst difference to LRU. A policy that was tuned on one of them must hold on the others:
``--folds`` chooses its parameters anew on parts of each trace and compares them with the shipped
ones on the other part and the other traces (``benchmarks.folds``).
``--hints`` prints the way of ``returns`` with hints from a router's queue and from clients
(``benchmarks.hinted`` says what is assumed).
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.folds import Measured, Trace, conversations_of, folds, parts_of
from benchmarks.hinted import Assumed, hinted_rate
from benchmarks.workloads import FAMILIES, bursts, eager, requests
from benchmarks.workloads.hard import HARD
from kvstore.index.eviction import make_policy
from kvstore.limits import LRU, RETURNS
from kvstore.trace.optimum import optimum
from kvstore.trace.requests import TraceRequest, read_trace
from kvstore.trace.simulate import replay

SMALL = (eager, bursts)
"""For stores that hold a few prompts."""

BUDGETS = "1000,2000,5000,10000"


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

    @property
    def points(self) -> float:
        """How far ``returns`` is above LRU, in points of hit rate."""
        return 100 * (self.returns - self.lru)

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


def families(count: int, seed: int, hard: bool) -> Iterator[tuple[str, Trace, tuple[int, ...]]]:
    """Each of them, and the budgets to try."""
    for family in HARD if hard else FAMILIES:
        budgets = (100, 300) if hard else (30, 100) if family in SMALL else (200, 1000)
        yield family.__name__, requests(family(random.Random(seed), count)), budgets


def points_to_lru(trace: Trace, blocks: int) -> float:
    """How far ``returns`` is above LRU."""
    lru, returns = (replay(trace, blocks, make_policy(one)).rate for one in (LRU, RETURNS))
    return 100 * (returns - lru)


def repeated(count: int, seeds: Iterable[int], hard: bool) -> Iterator[str]:
    """A table of the differences to LRU on families, each made from several seeds."""
    yield "| requests | blocks | points to LRU | two standard errors | worst | best |"
    yield "|---|--:|--:|--:|--:|--:|"
    for same in zip(*(families(count, seed, hard) for seed in seeds), strict=True):
        name, _, budgets = same[0]
        for blocks in budgets:
            points = [points_to_lru(trace, blocks) for _, trace, _ in same]
            error = 2 * stdev(points) / math.sqrt(len(points))
            yield (
                f"| {name} | {blocks:,} | {fmean(points):+.2f} | {error:.2f} "
                f"| {min(points):+.2f} | {max(points):+.2f} |"
            )


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


def study(
    name: str, trace: Trace, budgets: Sequence[int], variants: bool, seeds: Iterable[int]
) -> Iterator[StudyRow]:
    """The rows of one trace, then those of its variants."""
    named = [(name, trace, list(budgets))]
    if variants:
        smaller = [budget // 2 for budget in budgets]
        parts = parts_of(trace, 2, next(iter(seeds), 1))
        named += [(f"{name}, half {n}", part, smaller) for n, part in enumerate(parts, 1)]
        named += [
            (f"{name}, drawn anew {seed}", drawn_anew(trace, seed), list(budgets)) for seed in seeds
        ]
    for part_name, part, blocks in named:
        for budget in blocks:
            yield measured(part_name, part, budget)


def recorded(traces: Sequence[str], variants: bool, seeds: Sequence[int]) -> Iterator[StudyRow]:
    """The rows of recorded traces, each a path and its budgets."""
    for one in traces:
        trace, sizes = _with_budgets(one)
        yield from study(Path(one.partition(":")[0]).stem, trace, sizes, variants, seeds)


def _with_budgets(path: str) -> tuple[Trace, list[int]]:
    """The trace and the budgets of a path with budgets."""
    path, _, budgets = path.partition(":")
    return list(read_trace(Path(path))), [int(one) for one in (budgets or BUDGETS).split(",")]


def summary(rows: Iterable[StudyRow]) -> Iterator[str]:
    """For each trace the mean way over its budgets, and the worst difference to LRU."""
    named: dict[str, list[StudyRow]] = {}
    for row in rows:
        named.setdefault(row.name, []).append(row)
    for name, group in named.items():
        shares = [row.way for row in group if row.way is not None]
        mean = f"{fmean(shares):.1%}" if shares else ""
        yield f"| {name} | {len(group)} | {mean} | {min(row.points for row in group):+.2f} |"


def main(argv: Sequence[str]) -> int:
    """Print the tables; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", action="append", default=[], metavar="PATH[:BUDGETS]")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--hints", action="store_true")
    parser.add_argument("--folds", type=int, default=0)
    parser.add_argument("--horizon", type=float, default=60.0)
    parser.add_argument("--hard", action="store_true")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    if options.folds:
        named = [(Path(one.partition(":")[0]).stem, *_with_budgets(one)) for one in options.trace]
        for line in folds([Measured(*one) for one in named], options.folds, options.seed):
            print(line, flush=True)
        return 0
    if options.repeat > 1 and not options.trace:
        repeats = range(options.seed, options.seed + options.repeat)
        for line in repeated(options.requests, repeats, options.hard):
            print(line, flush=True)
        return 0
    rows: Iterable[StudyRow]
    if options.trace and options.hints:
        rows = (
            row for one in options.trace for row in with_hints(*_with_budgets(one), options.horizon)
        )
    elif options.trace:
        seeds = range(options.seed, options.seed + options.seeds)
        rows = recorded(options.trace, options.variants, seeds)
    else:
        rows = (
            measured(name, trace, budget)
            for name, trace, budgets in families(options.requests, options.seed, options.hard)
            for budget in budgets
        )
    print("| requests | blocks | LRU | returns | optimum | of the way |\n|---|--:|--:|--:|--:|--:|")
    done: list[StudyRow] = []
    for row in rows:
        print(row, flush=True)
        done.append(row)
    print("\n| requests | budgets | mean way | worst points to LRU |\n|---|--:|--:|--:|")
    for line in summary(done):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
