"""The health of a worker as this router sees it. Pure: observations in, a state and a reason out.

A worker is used only while it is ready. It is suspect if it was silent for a short time, or if a
leg failed there; unreachable if it refuses connections, or was silent for long. It leaves both
states by answering a check.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvrelay.errors import DeadlineExceeded, Draining, KvrelayError, Mismatch, Unavailable
from kvrelay.rpc.status import NothingListens
from kvrelay.v1 import router_pb2


class WorkerLost(Unavailable):
    """The worker died, was restarted, or its connection broke; its legs ended."""


class WorkerSilent(Unavailable):
    """The worker does not answer; it may be alive."""


class HealthState(Enum):
    """As in ``ListWorkers``."""

    STARTING = router_pb2.WORKER_STATE_STARTING
    READY = router_pb2.WORKER_STATE_READY
    DRAINING = router_pb2.WORKER_STATE_DRAINING
    SUSPECT = router_pb2.WORKER_STATE_SUSPECT
    UNREACHABLE = router_pb2.WORKER_STATE_UNREACHABLE


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """``problem`` is why a worker is not used: ``None`` exactly if it is ready."""

    state: HealthState
    problem: KvrelayError | None

    @property
    def lost(self) -> bool:
        """Whether its legs will produce nothing more."""
        return self.state in (HealthState.SUSPECT, HealthState.UNREACHABLE)

    @property
    def dead(self) -> bool:
        """Whether its process is presumed dead: the connection broke or is refused."""
        unreachable = self.state is HealthState.UNREACHABLE
        return unreachable and not isinstance(self.problem, DeadlineExceeded)

    def same_as(self, other: WorkerHealth) -> bool:
        """Errors are compared by their text."""
        return self.state is other.state and str(self.problem) == str(other.problem)


UNCHECKED = WorkerHealth(HealthState.STARTING, Unavailable("it was not asked yet"))
READY = WorkerHealth(HealthState.READY, None)


def health_after_answer(serving: bool, draining: bool) -> WorkerHealth:
    """The health of a worker that answered a check."""
    if draining:
        return WorkerHealth(HealthState.DRAINING, Draining("it is draining"))
    if not serving:
        return WorkerHealth(HealthState.DRAINING, Draining("it says NOT_SERVING"))
    return READY


def health_after_failure(
    error: KvrelayError, accepted: bool, silent_for: float, unreachable_after: float
) -> WorkerHealth:
    """The health after a failed check. ``accepted``: the worker belonged to the fleet before."""
    if not accepted and isinstance(error, NothingListens):
        return WorkerHealth(HealthState.STARTING, Unavailable("it does not listen yet"))
    if not accepted or isinstance(error, Mismatch):
        return WorkerHealth(HealthState.STARTING, error)
    if isinstance(error, DeadlineExceeded) and silent_for < unreachable_after:
        return WorkerHealth(HealthState.SUSPECT, error)
    return WorkerHealth(HealthState.UNREACHABLE, error)
