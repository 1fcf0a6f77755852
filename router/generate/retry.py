"""What was tried for one request, and whether to go on after a leg that failed. Pure.

A failure of any kind goes on elsewhere, within two bounds: so many failures in all, and so many
deaths of workers, since a request that kills whoever serves it must not go round the fleet. A
worker that dies after it served the request well did not die of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from kvrelay.errors import (
    DeadlineExceeded,
    Draining,
    Exhausted,
    KvrelayError,
    Mismatch,
    NotFound,
    Rejected,
    Unavailable,
    Unservable,
)
from router.workers.loss import WorkerLost

WELL_SERVED = 32  # tokens of one leg
NOBODY: Mapping[str, float] = MappingProxyType({})


class PoisonRequest(KvrelayError):
    """Workers die of this request."""


class RetryKind(Enum):
    """What to do with a worker that failed a leg."""

    ELSEWHERE = "go on elsewhere"  # this one is well
    SUSPECT = "go on elsewhere, and check this one before it is used again"
    AGAIN = "wait, then go on here or elsewhere"


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """How much may go wrong for one request. ``internal``: errors nobody expected."""

    failures: int = 8
    deaths: int = 2
    internal: int = 1


@dataclass(slots=True)
class Attempts:
    """``excluded`` are boot tokens of workers that failed this request."""

    bounds: RetryLimits = RetryLimits()
    excluded: set[str] = field(default_factory=set)
    avoided: set[str] = field(default_factory=set)
    lost: dict[str, float] = field(default_factory=dict)  # by boot token, when
    failures: int = 0
    internal: int = 0
    last: KvrelayError | None = None

    def failed(
        self,
        key: str,
        error: KvrelayError,
        gained: int,
        begun: bool,
        now: float = 0.0,
        answered: Mapping[str, float] = NOBODY,
    ) -> RetryKind:
        """A leg on worker ``key`` ended with ``error`` after ``gained`` tokens.

        ``begun``: the client has tokens already. ``answered`` is when the last check began that a
        worker answered: if that was after the connection to it was lost, it did not die then,
        whatever became of it since. Raises what the client is to be told when going on cannot
        help or was tried too often.
        """
        if _final(error):
            raise error
        self.last = error
        if isinstance(error, Exhausted) and begun:
            return RetryKind.AGAIN
        if isinstance(error, Draining):  # it may stay after all; who says so twice is not believed
            (self.excluded if key in self.avoided else self.avoided).add(key)
            return RetryKind.SUSPECT
        (self.avoided if isinstance(error, Unavailable) else self.excluded).add(key)
        self._count(key, error, gained, now, answered)
        return RetryKind.ELSEWHERE if isinstance(error, Exhausted) else RetryKind.SUSPECT

    def _count(
        self, key: str, error: KvrelayError, gained: int, now: float, answered: Mapping[str, float]
    ) -> None:
        self.failures += 1
        self.internal += type(error) is KvrelayError
        if isinstance(error, WorkerLost) and gained < WELL_SERVED:
            self.lost[key] = now  # once: two broken connections to one worker are no two deaths
        deaths = sum(answered.get(lost, at) <= at for lost, at in self.lost.items())
        if deaths >= self.bounds.deaths:
            raise PoisonRequest(
                f"{deaths} workers died while they served this request, it is not tried again"
                f" (the last one: {error})"
            ) from error
        if self.failures > self.bounds.failures or self.internal > self.bounds.internal:
            raise error


def _final(error: KvrelayError) -> bool:
    """Whether every worker would say the same."""
    if isinstance(error, Mismatch):
        return error.field not in ("leg.namespace_digest", "role")  # another worker may fit
    return isinstance(error, Rejected | NotFound | Unservable | DeadlineExceeded)
