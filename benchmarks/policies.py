"""Placement policies behind one call: the router's own, and its baselines."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from router.placement.policy import LegDemand, WorkerChoice, choose, fitting, tokens_held
from router.workers.candidate import Candidate


class PlacementPolicy(Protocol):
    """Pure but for its own turn or random state."""

    def choose(
        self, demand: LegDemand, candidates: Sequence[Candidate], leading: Mapping[str, int]
    ) -> WorkerChoice | None:
        """``None`` without candidates, ``Rejected`` if none could ever hold the request."""


class RouterPolicy:
    """The least work before the request, prefixes counted: ``router.placement.policy``."""

    def choose(
        self, demand: LegDemand, candidates: Sequence[Candidate], leading: Mapping[str, int]
    ) -> WorkerChoice | None:
        return choose(demand, candidates, leading)


class RoundRobin:
    """One worker after another."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(
        self, demand: LegDemand, candidates: Sequence[Candidate], leading: Mapping[str, int]
    ) -> WorkerChoice | None:
        workers = fitting(demand, candidates)
        self._turn += 1
        return _choice(demand, workers[self._turn % len(workers)], leading) if workers else None


class RandomWorker:
    """A random worker."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(
        self, demand: LegDemand, candidates: Sequence[Candidate], leading: Mapping[str, int]
    ) -> WorkerChoice | None:
        workers = fitting(demand, candidates)
        return _choice(demand, self._random.choice(workers), leading) if workers else None


class LeastLoaded:
    """The worker with the least in flight, whatever it holds."""

    def choose(
        self, demand: LegDemand, candidates: Sequence[Candidate], leading: Mapping[str, int]
    ) -> WorkerChoice | None:
        workers = fitting(demand, candidates)
        if not workers:
            return None
        weights = demand.weights
        least = min(workers, key=lambda c: c.tokens * weights.token + c.legs * weights.leg)
        return _choice(demand, least, leading)


def _choice(demand: LegDemand, worker: Candidate, leading: Mapping[str, int]) -> WorkerChoice:
    return WorkerChoice(worker.key, tokens_held(demand, leading.get(worker.key, 0)), demand.tokens)


_MAKERS: Mapping[str, Callable[[int], PlacementPolicy]] = {
    "affinity": lambda seed: RouterPolicy(),
    "least-loaded": lambda seed: LeastLoaded(),
    "round-robin": lambda seed: RoundRobin(),
    "random": RandomWorker,
}
POLICIES = tuple(_MAKERS)


def placement_policy(name: str, seed: int = 0) -> PlacementPolicy:
    """One of ``POLICIES``, new; ``seed`` is for the random one."""
    return _MAKERS[name](seed)
