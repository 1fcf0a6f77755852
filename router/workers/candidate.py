"""A worker as placement sees it: its load and its capacity. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.errors import Rejected


@dataclass(frozen=True, slots=True)
class Candidate:
    """``key`` is the worker's boot token: a restarted worker is another worker."""

    key: str
    legs: int  # on the worker, as far as this router knows
    tokens: int  # of these legs
    max_model_len: int
    capacity: int  # positions that its whole pool holds
    free: int | None = None  # positions that no request holds now; ``None``: unknown
    queued: int = 0  # tokens to compute before those of a new request

    @property
    def longest(self) -> int:
        """Positions of the longest request that it could run alone."""
        return min(self.max_model_len, self.capacity)

    def fits(self, positions: int) -> bool:
        """D5 of docs/accounting.md."""
        return positions <= self.longest


def too_long(positions: int, candidates: Sequence[Candidate]) -> Rejected:
    """The error for a request that none of the workers can ever serve."""
    longest = max(candidate.longest for candidate in candidates)
    return Rejected(
        "max_tokens",
        f"prompt and output need {positions} positions, the largest worker has {longest}:"
        " shorten the prompt or lower max_tokens",
    )
