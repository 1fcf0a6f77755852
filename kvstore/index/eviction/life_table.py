"""A life table: how soon blocks are used again, learned by class while it happens.

As an actuary counts: for each class and each octave of age (time since the last use), ``uses`` is
how often a block of that age was used again and ``waits`` the block-seconds in which it could have
been; their quotient is the hazard of reuse at that age. Blocks that still wait are counted by
cohort, so what has not come back weighs as much as what has. A cohort is short against the ages of
its blocks: one as long as the time between two calls of ``refresh`` gives young blocks wrong waits.

A class is a wide class and, within it, one of ``GAPS``. The hazards of a class are drawn towards
those of its wide class, and these towards the common ones, as if a few blocks more had been seen.

From the hazards follows ``rank``: the most uses per second of waiting that keeping a block can
bring, over all times to keep it. That is Gittins' index (J. R. Statist. Soc. B 41, 1979) with the
use as the reward and the room as the price; as eviction, the "hit density" of Beckmann, Chen and
Cidon ("LHD", NSDI 2018), which also draws its victim from a few random candidates. SAECache (Fang
et al., arXiv:2605.18825) learns online too, by the type of tokens. No paper on CacheSage was found.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

OCTAVES = 20
"""Ages of 2 s and less, of 4 s and less, up to 2**20 s: twelve days."""

_ENDS = [2.0 ** (b + 1) for b in range(OCTAVES)]
_WIDTHS = [2.0, *_ENDS[:-1]]

GAPS = 16
"""Classes within a wide class: ``use_class // GAPS`` is the wide class."""

LONGEST = 2.0**OCTAVES
"""Ages are cut to this, so that no time can make a count, a rank or an age infinite."""

FASTEST = 1e9
"""Hazards are cut to one reuse in a nanosecond, so that no expected waiting time becomes zero."""

COHORT, COHORTS = 1.0, 256
"""The shortest cohort in seconds, half of the first octave; and so many before they are merged."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """How fast is learned and forgotten. ``few`` and ``many`` are weights, in blocks, of a prior.

    ``learn``: ranks are computed anew every so many prompts. ``fade``: the factor of every count
    then; a count halves in 277 refreshes. ``few``: of the common hazards in each wide class, less
    than one prompt. ``many``: of a wide class's hazards in each of its classes, several prompts.
    """

    learn: int = 25
    fade: float = 0.9975
    few: float = 4.0
    many: float = 300.0


TUNED = Tuning()
"""See ``benchmarks.evict --folds``."""


class LifeTable:
    """Pure; ``begin`` and ``end`` cost O(log cohorts), ``refresh`` O(cohorts * classes)."""

    def __init__(self, tuning: Tuning = TUNED) -> None:
        self._tuning = tuning
        self._uses: dict[int, list[float]] = {}
        self._waits: dict[int, list[float]] = {}
        self._starts: list[float] = []  # of the cohorts, oldest first
        self._cohorts: list[dict[int, int]] = []
        self._counted = 0.0  # waiting is counted until this time
        self._latest = -math.inf  # the last use
        self._ranks: dict[int, list[float]] = {}
        self._common = [0.0] * (OCTAVES + 1)

    @property
    def ready(self) -> bool:
        """Whether any reuse has been counted."""
        return any(self._common)

    def begin(self, use_class: int, at: float) -> None:
        """A block of class ``use_class`` was used now and waits."""
        if not self._starts:
            self._open(at)
            self._counted = at
        elif at > max(self._latest, self._starts[-1] + COHORT):
            if len(self._starts) < COHORTS:
                self._open(at)
            else:
                self._merge(at)
        self._latest = max(self._latest, at)
        self._cohort(at)[use_class] += 1

    def end(self, use_class: int, since: float, now: float, used: bool) -> None:
        """A waiting block was used again, or is forgotten."""
        cohort = self._cohort(since)
        cohort[use_class] -= 1
        if not cohort[use_class]:
            del cohort[use_class]
        self._wait(use_class, 1, since, now)
        if used:
            octave = _octave(_age(since, now))
            self._uses.setdefault(use_class, [0.0] * OCTAVES)[octave] += 1.0

    def rank(self, use_class: int, age: float) -> float:
        """The expected uses per second of a block, interpolated between octaves."""
        row = self._ranks.get(use_class, self._common)
        if not age >= 2.0:
            octave = 0
            part = max(age, 0.0) / 2.0
        elif age < LONGEST / 2.0:
            mantissa, exponent = math.frexp(age)
            octave = exponent - 1
            part = 2.0 * mantissa - 1.0
        else:
            return row[OCTAVES - 1]
        return row[octave] + (row[octave + 1] - row[octave]) * part

    def reuse_age(self, share: float) -> float | None:
        """The age by which ``share`` of all reuse has happened, ``None`` without any reuse."""
        ages = [sum(row[b] for row in self._uses.values()) for b in range(OCTAVES)]
        left = share * sum(ages)
        if not left:
            return None
        for octave, count in enumerate(ages):
            if count >= left:
                low = 0.0 if octave == 0 else 2.0**octave
                return low + _WIDTHS[octave] * left / count
            left -= count
        return LONGEST

    def refresh(self, now: float) -> None:
        """Fade old counts, add the waiting time since the last call, and compute the ranks.

        A cohort never begins before a use that is counted in an earlier one.
        """
        now = max(now, self._latest)
        for table in (self._uses, self._waits):
            for use_class, row in table.items():
                table[use_class] = [count * self._tuning.fade for count in row]
        ends = [*self._starts, now][1:]
        for start, end, cohort in zip(self._starts, ends, self._cohorts, strict=True):
            for use_class, count in cohort.items():
                self._wait(use_class, count, (start + end) / 2, now)
        self._counted = now
        self._merge(now)
        self._rank_all()

    def _cohort(self, at: float) -> dict[int, int]:
        """The blocks that wait since ``at``. A cohort begins after its start, so that one opened at
        the time of a use does not get the blocks that were counted before it was opened."""
        return self._cohorts[max(bisect_left(self._starts, at) - 1, 0)]

    def _open(self, start: float) -> None:
        self._starts.append(start)
        self._cohorts.append(defaultdict(int))

    def _wait(self, use_class: int, count: int, since: float, now: float) -> None:
        """Count the waiting time since the last call of ``refresh``, at each age."""
        if (row := self._waits.get(use_class)) is None:
            row = self._waits[use_class] = [0.0] * OCTAVES
        old, new = _age(since, self._counted), _age(since, now)
        octave, last = _octave(old), _octave(new)
        while octave < last:
            end = _ENDS[octave]
            row[octave] += count * (end - old)
            old = end
            octave += 1
        row[last] += count * max(new - old, 0.0)

    def _merge(self, now: float) -> None:
        """Start a cohort; merge an old one into the one before if both are short for their age."""
        pairs = list(zip(self._starts, self._cohorts, strict=True))
        self._starts = []
        self._cohorts = []
        for number, (start, cohort) in enumerate(pairs):
            end = pairs[number + 1][0] if number + 1 < len(pairs) else now
            if self._starts and end - self._starts[-1] < (now - end) / 8:
                for use_class, count in cohort.items():
                    self._cohorts[-1][use_class] += count
            else:
                self._starts.append(start)
                self._cohorts.append(cohort)
        if not self._starts or now > self._starts[-1]:
            self._open(now)

    def _rank_all(self) -> None:
        uses, waits = _sums(self._uses.values()), _sums(self._waits.values())
        common = [u / w if w else 0.0 for u, w in zip(uses, waits, strict=True)]
        self._common = _index(common)
        classes: dict[int, list[int]] = defaultdict(list)
        for use_class in self._waits:
            classes[use_class // GAPS].append(use_class)
        self._ranks = {}
        for narrow in classes.values():
            wide = self._hazards(narrow, common, self._tuning.few)
            for use_class in narrow:
                self._ranks[use_class] = _index(self._hazards([use_class], wide, self._tuning.many))

    def _hazards(self, classes: list[int], prior: list[float], weight: float) -> list[float]:
        """The hazards of some classes together, drawn towards ``prior``."""
        uses = _sums(self._uses[c] for c in classes if c in self._uses)
        waits = _sums(self._waits[c] for c in classes)
        return [
            (u + weight * p * width) / (w + weight * width)
            for u, w, p, width in zip(uses, waits, prior, _WIDTHS, strict=True)
        ]


def _age(since: float, now: float) -> float:
    """Seconds from ``since`` to ``now``, 0 if they are not in this order or not numbers."""
    return min(max(0.0, now - since), LONGEST)


def _octave(age: float) -> int:
    return 0 if age < 2.0 else min(math.frexp(age)[1] - 1, OCTAVES - 1)


def _sums(rows: Iterable[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)] or [0.0] * OCTAVES


def _index(hazards: list[float]) -> list[float]:
    """For each starting octave the best quotient of expected uses and waiting time."""
    steps = []
    for each, width in zip(hazards, _WIDTHS, strict=True):
        hazard = min(each, FASTEST)
        chance = -math.expm1(-hazard * width)
        steps.append((chance, chance / hazard if hazard > 1e-12 else width))
    best = []
    for first in range(OCTAVES):
        left, uses, waits, top = 1.0, 0.0, 0.0, 0.0
        for chance, wait in steps[first:]:
            uses += left * chance
            waits += left * wait
            left *= 1.0 - chance
            top = max(top, uses / waits)
        best.append(top)
    return best
