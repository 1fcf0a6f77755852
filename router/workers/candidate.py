"""A worker as placement sees it: its load and its capacity. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.errors import KvrelayError, Rejected, Unservable


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


def longest(candidates: Sequence[Candidate]) -> int:
    """Positions of the longest request that one of the workers could run."""
    return max(candidate.longest for candidate in candidates)


def too_long(positions: int, candidates: Sequence[Candidate]) -> KvrelayError:
    """The error for a request that none of the workers can ever serve.

    It is the client's mistake only if the request is longer than ``max_model_len``.
    """
    served = longest(candidates)
    allowed = max(candidate.max_model_len for candidate in candidates)
    if positions <= allowed:
        return Unservable(
            f"prompt and output need {positions} positions, within the {allowed} that are allowed"
            f" here, but no worker's KV pool holds more than {served}: its operator must raise"
            " --kv-memory (or --num-blocks), or lower --max-model-len"
        )
    return Rejected(
        "max_tokens",
        f"prompt and output need {positions} positions, the largest worker has {allowed}:"
        " shorten the prompt or ask for fewer tokens",
    )
