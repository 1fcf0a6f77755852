"""Cross-validation of the eviction policy's parameters: see ``benchmarks.evict --folds``.

A trace is cut by conversation. What is best on all parts but one is judged on that part, and on the
other traces whole, where nothing was chosen. Parts have budgets that are smaller by as much. A
choice may not be worse than LRU by more than ``WORST`` points where it was made, if any is not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from statistics import fmean

from kvstore.index.eviction.expected_returns import ExpectedReturns
from kvstore.index.eviction.life_table import TUNED, Tuning
from kvstore.index.eviction.policy import LeastRecentlyUsed
from kvstore.trace.optimum import optimum
from kvstore.trace.requests import TraceRequest
from kvstore.trace.simulate import replay

GRID = [
    Tuning(learn=learn, fade=fade, many=many)
    for learn, fade, many in product((25, 100), (0.99, 0.9975), (100.0, 300.0, 1000.0))
]
"""The shipped parameters are among them."""

WORST = -0.1

SHARED = 200
"""A first block of more requests than this is a system prompt: the second tells them apart."""

Trace = Sequence[TraceRequest]


@dataclass(frozen=True, slots=True)
class Score:
    """The mean way from LRU to the optimum, and the worst difference to LRU in points."""

    way: float
    points: float

    def __str__(self) -> str:
        return f"{self.way:.1%} ({self.points:+.2f})"


@dataclass(frozen=True)
class Measured:
    """A trace and its budgets, on which parameters are compared."""

    name: str
    trace: Trace
    budgets: Sequence[int]

    @cached_property
    def _bounds(self) -> Mapping[int, tuple[float, float]]:
        """Hit rates of LRU and of the optimum, where there is something between them."""
        found = {
            budget: (
                replay(self.trace, budget, LeastRecentlyUsed()).rate,
                optimum(self.trace, budget).rate,
            )
            for budget in self.budgets
        }
        return {budget: pair for budget, pair in found.items() if pair[1] - pair[0] > 0.001}

    @cached_property
    def _known(self) -> dict[Tuning, Score]:
        return {}

    def score(self, tuning: Tuning) -> Score:
        """Of the policy with these parameters."""
        if tuning not in self._known:
            gains = []
            shares = []
            for budget, (lru, best) in self._bounds.items():
                gains.append(replay(self.trace, budget, ExpectedReturns(tuning=tuning)).rate - lru)
                shares.append(gains[-1] / (best - lru))
            mean = fmean(shares) if shares else 0.0
            self._known[tuning] = Score(mean, 100 * min(gains, default=0.0))
        return self._known[tuning]


def conversations_of(trace: Trace) -> Iterator[bytes]:
    """For each request a block that its conversation has to itself and begins with."""
    uses: dict[bytes, int] = {}
    for request in trace:
        for name in request.names[:1]:
            uses[name] = uses.get(name, 0) + 1
    for request in trace:
        shared = uses.get(request.names[0], 0) > SHARED if request.names else False
        yield next(iter(request.names[shared and len(request.names) > 1 :]), b"")


def parts_of(trace: Trace, count: int, seed: int) -> list[list[TraceRequest]]:
    """The trace in so many parts by conversation."""
    chance = random.Random(seed)
    part: dict[bytes, int] = {}
    parts: list[list[TraceRequest]] = [[] for _ in range(count)]
    for request, key in zip(trace, conversations_of(trace), strict=True):
        if key not in part:
            part[key] = chance.randrange(count)
        parts[part[key]].append(request)
    return parts


def chosen(among: Sequence[Measured]) -> Tuning:
    """The best parameters there; the shipped ones if nothing tells them apart."""

    def rank(tuning: Tuning) -> tuple[bool, float, bool]:
        scores = [one.score(tuning) for one in among]
        safe = min(score.points for score in scores) >= WORST
        return safe, fmean(score.way for score in scores), tuning == TUNED

    return max(GRID, key=rank)


def folds(traces: Sequence[Measured], count: int, seed: int) -> Iterator[str]:
    """A table: what was chosen where, what it scores where nothing was chosen; the shipped ones."""
    yield "| chosen on | learn | fade | many | judged on | chosen there | shipped |"
    yield "|---|--:|--:|--:|---|--:|--:|"
    for whole in traces:
        cut = parts_of(whole.trace, count, seed)
        sizes = [budget // count for budget in whole.budgets]
        named = partial(Measured, budgets=sizes)
        parts = [named(f"{whole.name}, part {n}", part) for n, part in enumerate(cut, 1)]
        for part in parts:
            others = [other for other in parts if other is not part]
            best = chosen(others)
            where = " and ".join(other.name for other in others)
            for judged in (part, *(one for one in traces if one is not whole)):
                yield (
                    f"| {where} | {best.learn} | {best.fade:g} | {best.many:g} | {judged.name} "
                    f"| {judged.score(best)} | {judged.score(TUNED)} |"
                )
