"""Which worker gets a leg: filter, score, pick. Pure; values in, a value out.

The score is the work that would stand before the request on that worker, in tokens: what is in
flight there plus what of this request it would have to compute or fetch. So a worker that holds the
prefix wins only while its queue is shorter by less than the hit is worth: a hot prefix cannot bury
it. Equal scores are decided by XXH3 rendezvous on the prefix, so equal prefixes meet again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kvrelay.errors import Rejected


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as the policy sees it. ``key`` is its boot token: a restart is another worker."""

    key: str
    legs: int  # under way there, as far as this router knows
    tokens: int  # of those legs
    max_model_len: int
    capacity: int  # positions that its whole pool holds
    free: int | None = None  # positions not held by requests now; ``None``: not told
    queued: int = 0  # tokens to compute before a request that comes now

    def fits(self, positions: int) -> bool:
        """D5 of docs/accounting.md."""
        return positions <= min(self.max_model_len, self.capacity)


@dataclass(frozen=True, slots=True)
class CostWeights:
    """What a token to compute, in flight, a leg in flight and a token to fetch cost."""

    fresh: float
    token: float
    leg: float
    fetch: float
    whole: bool  # a leg in flight weighs all its tokens, not only those it had to compute


PREFILL = CostWeights(
    fresh=1.0, token=1.0, leg=16.0, fetch=0.1, whole=False
)  # computing is all there is
DECODE = CostWeights(fresh=0.05, token=0.02, leg=64.0, fetch=0.05, whole=True)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Names of a prompt's full blocks, in order, and the tokens in each."""

    names: tuple[bytes, ...]
    block_size: int


@dataclass(frozen=True, slots=True)
class LegDemand:
    """What is to be placed: tokens to compute or fetch, ``positions`` it can ever need."""

    tokens: int
    positions: int
    prefix: Prefix
    weights: CostWeights
    stored: int = 0  # leading tokens that any worker could fetch


@dataclass(frozen=True, slots=True)
class Choice:
    """The worker picked, how many leading tokens it is thought to hold, and the work that makes."""

    key: str
    hit: int
    work: int  # tokens that the leg counts for while it is there


def choose(
    wish: LegDemand, candidates: Sequence[Candidate], leading: Mapping[str, int]
) -> Choice | None:
    """The cheapest of those that fit; ``None`` without candidates, ``Rejected`` if none fits."""
    fitting = fitting_of(wish, candidates)
    if not fitting:
        return None
    hits = {c.key: held_by(wish, leading.get(c.key, 0)) for c in fitting}
    scores = [(_score(wish, c, hits[c.key]), c.key) for c in fitting]
    best = min(score for score, _ in scores)
    ties = [key for score, key in scores if score == best]
    picked = ties[0] if len(ties) == 1 else max(ties, key=lambda key: _rendezvous(wish, key))
    return Choice(picked, hits[picked], _work(wish, hits[picked]))


def fitting_of(wish: LegDemand, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that could hold the request; ``Rejected`` if there are candidates and none could."""
    fitting = [candidate for candidate in candidates if candidate.fits(wish.positions)]
    if candidates and not fitting:
        raise too_long(wish.positions, candidates)
    return fitting


def too_long(positions: int, candidates: Sequence[Candidate]) -> Rejected:
    """Why a request can never be served by any of these."""
    most = max(min(c.max_model_len, c.capacity) for c in candidates)
    return Rejected(
        "max_tokens",
        f"prompt and output need {positions} positions, the largest worker has {most}:"
        " shorten the prompt or lower max_tokens",
    )


def held_by(wish: LegDemand, blocks: int) -> int:
    """Tokens that a hit of so many blocks saves: the last one is always computed."""
    return min(blocks * wish.prefix.block_size, wish.tokens - 1)


def _score(wish: LegDemand, candidate: Candidate, hit: int) -> float:
    weights = wish.weights
    waiting = candidate.tokens * weights.token + candidate.legs * weights.leg
    return waiting + _missing(wish, hit) + _shortage(wish, candidate, hit)


def _missing(wish: LegDemand, hit: int) -> float:
    """What is to be computed or fetched."""
    found = max(hit, min(wish.stored, wish.tokens - 1))
    weights = wish.weights
    return (found - hit) * weights.fetch + (wish.tokens - found) * weights.fresh


def _work(wish: LegDemand, hit: int) -> int:
    return wish.tokens if wish.weights.whole else round(_missing(wish, hit))


def _shortage(wish: LegDemand, candidate: Candidate, hit: int) -> float:
    """Positions that have to be given up by others first."""
    return 0.0 if candidate.free is None else max(0.0, wish.tokens - hit - candidate.free)


def _rendezvous(wish: LegDemand, key: str) -> tuple[int, str]:
    names = wish.prefix.names
    first = names[0] if names else wish.tokens.to_bytes(8, "little")
    return xxh3_64_intdigest(first + key.encode()), key
