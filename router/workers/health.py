"""The life of a worker as this router sees it. Pure: observations in, a state and a reason out.

A worker is used only while it is ready. Suspect is who is silent, or where a leg failed; gone is
who refuses connections, or was silent for long. Both come back by answering a check.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvrelay.errors import DeadlineExceeded, Draining, KvrelayError, Mismatch, Unavailable
from kvrelay.v1 import router_pb2


class HealthState(Enum):
    """As in ``ListWorkers``."""

    STARTING = router_pb2.WORKER_STATE_STARTING
    READY = router_pb2.WORKER_STATE_READY
    DRAINING = router_pb2.WORKER_STATE_DRAINING
    SUSPECT = router_pb2.WORKER_STATE_SUSPECT
    GONE = router_pb2.WORKER_STATE_UNREACHABLE


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """``problem`` is why a worker is not used: ``None`` exactly when it is ready."""

    state: HealthState
    problem: KvrelayError | None

    @property
    def lost(self) -> bool:
        """Whether the legs there will bring nothing more."""
        return self.state in (HealthState.SUSPECT, HealthState.GONE)

    def says_the_same(self, other: WorkerHealth) -> bool:
        """Errors are compared by what they say."""
        return self.state is other.state and str(self.problem) == str(other.problem)


UNASKED = WorkerHealth(HealthState.STARTING, Unavailable("it was not asked yet"))
READY = WorkerHealth(HealthState.READY, None)


def of_answer(serving: bool, draining: bool) -> WorkerHealth:
    """The verdict on a worker that answered."""
    if draining:
        return WorkerHealth(HealthState.DRAINING, Draining("it is draining"))
    if not serving:
        return WorkerHealth(HealthState.DRAINING, Draining("it says NOT_SERVING"))
    return READY


def of_failure(
    error: KvrelayError, known: bool, silent_for: float, gone_after: float
) -> WorkerHealth:
    """The verdict after a check that failed. ``known``: it was accepted once."""
    if not known or isinstance(error, Mismatch):
        return WorkerHealth(HealthState.STARTING, error)
    if isinstance(error, DeadlineExceeded) and silent_for < gone_after:
        return WorkerHealth(HealthState.SUSPECT, error)
    return WorkerHealth(HealthState.GONE, error)
