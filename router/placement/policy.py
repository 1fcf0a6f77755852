"""The placement policy: filter, score, choose. Pure; values in, a value out.

The score is the work that would precede the request on that worker, in tokens: the work there now,
and what of this request the worker would compute or fetch. So a worker that holds the prefix wins
only while its queue is longer by less than the hit is worth, and a hot prefix cannot overload it.
Equal scores are decided by XXH3 rendezvous on the prefix, so that equal prefixes meet again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from router.workers.candidate import Candidate, too_long


@dataclass(frozen=True, slots=True)
class CostWeights:
    """Cost of a token to compute, of a token in flight, of a leg in flight, of a token to fetch.

    ``whole``: a leg in flight counts all its tokens, not only those it had to compute.
    """

    fresh: float
    token: float
    leg: float
    fetch: float
    whole: bool


# A prefill worker does nothing but compute; a decode worker's time goes to its streams.
PREFILL = CostWeights(fresh=1.0, token=1.0, leg=16.0, fetch=0.1, whole=False)
DECODE = CostWeights(fresh=0.05, token=0.02, leg=64.0, fetch=0.05, whole=True)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Names of a prompt's full blocks, in order, and the tokens in each."""

    names: tuple[bytes, ...]
    block_size: int


@dataclass(frozen=True, slots=True)
class LegDemand:
    """What a leg needs of a worker: ``tokens`` to compute or fetch, ``positions`` in all.

    ``stored``: leading tokens that any worker could fetch from the store.
    """

    tokens: int
    positions: int
    prefix: Prefix
    weights: CostWeights
    stored: int = 0


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """The worker chosen; ``hit``: leading tokens that it is believed to hold.

    ``work``: tokens that the leg counts for while it is there.
    """

    key: str
    hit: int
    work: int


def choose(
    demand: LegDemand, candidates: Sequence[Candidate], leading: Mapping[str, int]
) -> WorkerChoice | None:
    """The cheapest worker that fits; ``None`` without candidates, ``Rejected`` if none fits.

    ``leading``: blocks of the prefix that each worker is believed to hold.
    """
    workers = fitting(demand, candidates)
    if not workers:
        return None
    hits = {worker.key: tokens_held(demand, leading.get(worker.key, 0)) for worker in workers}
    scores = [(_score(demand, worker, hits[worker.key]), worker.key) for worker in workers]
    best = min(score for score, _ in scores)
    ties = [key for score, key in scores if score == best]
    key = ties[0] if len(ties) == 1 else max(ties, key=lambda key: _rendezvous(demand, key))
    return WorkerChoice(key, hits[key], _work(demand, hits[key]))


def fitting(demand: LegDemand, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The workers that could hold the request; ``Rejected`` if no candidate could."""
    workers = [candidate for candidate in candidates if candidate.fits(demand.positions)]
    if candidates and not workers:
        raise too_long(demand.positions, candidates)
    return workers


def tokens_held(demand: LegDemand, blocks: int) -> int:
    """Tokens that a hit of ``blocks`` saves: the last token is always computed."""
    return min(blocks * demand.prefix.block_size, demand.tokens - 1)


def _score(demand: LegDemand, worker: Candidate, hit: int) -> float:
    weights = demand.weights
    in_flight = worker.tokens * weights.token + worker.legs * weights.leg
    return in_flight + _missing(demand, hit) + _shortage(demand, worker, hit)


def _missing(demand: LegDemand, hit: int) -> float:
    """The cost of what is to be computed or fetched."""
    weights = demand.weights
    available = max(hit, min(demand.stored, demand.tokens - 1))
    return (available - hit) * weights.fetch + (demand.tokens - available) * weights.fresh


def _work(demand: LegDemand, hit: int) -> int:
    return demand.tokens if demand.weights.whole else round(_missing(demand, hit))


def _shortage(demand: LegDemand, worker: Candidate, hit: int) -> float:
    """Positions that other requests there would have to give up."""
    return 0.0 if worker.free is None else max(0.0, demand.tokens - hit - worker.free)


def _rendezvous(demand: LegDemand, key: str) -> tuple[int, str]:
    names = demand.prefix.names
    first = names[0] if names else demand.tokens.to_bytes(8, "little")
    return xxh3_64_intdigest(first + key.encode()), key
