"""How long a worker may be silent before it is suspect. Pure: measured seconds in, seconds out.

A worker that answers slowly gets more time, since moving its legs would slow down other workers.
All workers get more while the router's own timers fire late, as they do on a busy host: a process
that waits for a core is not dead. Lifeguard (Dadgar et al., 2017) widens the timeouts of a failure
detector by the health of the detector in the same way.
"""

from __future__ import annotations

SLOW_FACTOR = 3.0  # times the slowest of the last answers
SLOW_DECAY = 0.8  # of the slowest answer, with each answer
LATE_FACTOR = 80.0  # times the mean lateness of the router's timer
LATE_WEIGHT = 0.1  # of the newest lateness in the mean
MAX_FACTOR = 6.0  # times the configured silence


class Patience:
    """The silence allowed to one worker; ``configured`` on a quiet host."""

    def __init__(self, configured: float) -> None:
        self._configured = configured
        self._slowest = 0.0
        self._late = 0.0

    @property
    def silence(self) -> float:
        """Seconds that the worker may be silent now."""
        wanted = max(self._configured, SLOW_FACTOR * self._slowest, LATE_FACTOR * self._late)
        return min(wanted, MAX_FACTOR * self._configured)

    def answered(self, seconds: float) -> None:
        """The worker answered a check after ``seconds``."""
        self._slowest = max(seconds, SLOW_DECAY * self._slowest)

    def fell_silent(self, seconds: float) -> None:
        """The worker has not answered a check for ``seconds``."""
        self._slowest = max(self._slowest, seconds)

    def woke(self, late: float, interval: float) -> None:
        """A timer of ``interval`` seconds fired late; one long pause counts as one interval."""
        self._late += LATE_WEIGHT * (min(late, interval) - self._late)
