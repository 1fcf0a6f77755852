"""The ways to choose a worker, behind one call: ours, and those it is compared with."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from router.placement.policy import Candidate, Choice, LegDemand, choose, fitting_of, held_by


class PlacementPolicy(Protocol):
    """Pure but for what it keeps of its own turns."""

    def choose(
        self, wish: LegDemand, candidates: Sequence[Candidate], leading: Mapping[str, int]
    ) -> Choice | None:
        """``None`` without candidates, ``Rejected`` if none could ever hold the request."""


class Affine:
    """Least work in front, prefixes counted: see ``router.placement.policy``."""

    def choose(
        self, wish: LegDemand, candidates: Sequence[Candidate], leading: Mapping[str, int]
    ) -> Choice | None:
        """As the protocol says."""
        return choose(wish, candidates, leading)


class RoundRobin:
    """One after another."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(
        self, wish: LegDemand, candidates: Sequence[Candidate], leading: Mapping[str, int]
    ) -> Choice | None:
        """As the protocol says."""
        fitting = fitting_of(wish, candidates)
        self._turn += 1
        return _choice(wish, fitting[self._turn % len(fitting)], leading) if fitting else None


class AnyOne:
    """At random."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def choose(
        self, wish: LegDemand, candidates: Sequence[Candidate], leading: Mapping[str, int]
    ) -> Choice | None:
        """As the protocol says."""
        fitting = fitting_of(wish, candidates)
        return _choice(wish, self._chance.choice(fitting), leading) if fitting else None


class LeastLoaded:
    """The one with the least in flight, whatever it holds."""

    def choose(
        self, wish: LegDemand, candidates: Sequence[Candidate], leading: Mapping[str, int]
    ) -> Choice | None:
        """As the protocol says."""
        fitting = fitting_of(wish, candidates)
        if not fitting:
            return None
        weights = wish.weights
        return _choice(
            wish,
            min(fitting, key=lambda c: c.tokens * weights.token + c.legs * weights.leg),
            leading,
        )


def _choice(wish: LegDemand, candidate: Candidate, leading: Mapping[str, int]) -> Choice:
    return Choice(candidate.key, held_by(wish, leading.get(candidate.key, 0)), wish.tokens)


_MAKERS: Mapping[str, Callable[[int], PlacementPolicy]] = {
    "affinity": lambda seed: Affine(),
    "least-loaded": lambda seed: LeastLoaded(),
    "round-robin": lambda seed: RoundRobin(),
    "random": AnyOne,
}
POLICIES = tuple(_MAKERS)


def policy(name: str, seed: int = 0) -> PlacementPolicy:
    """One of ``POLICIES``, new; ``seed`` is for those that draw."""
    return _MAKERS[name](seed)
