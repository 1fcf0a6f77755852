"""Whether somebody who failed may be asked again: not for a while, then by one caller at first.

The pause doubles up to a limit and ends with an answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 2.0
TIMEOUTS_TO_OPEN = 2


class CircuitBreaker:
    """Thread-safe. ``clock`` is for tests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = 0.0
        self._closed_at = 0.0  # when the next caller may try

    @property
    def open(self) -> bool:
        """Whether nobody may ask now."""
        with self._lock:
            return self._clock() < self._closed_at

    def enter(self) -> float:
        """Seconds until the next try; 0.0: the caller may ask, and says how it went."""
        with self._lock:
            now = self._clock()
            if now < self._closed_at:
                return self._closed_at - now
            if self._pause:
                self._closed_at = now + self._pause  # this caller tries; the others wait for it
            return 0.0

    def failed(self, gone: bool) -> None:
        """There was no answer; ``gone``: and there is nobody to wait for."""
        with self._lock:
            self._failures += 1
            if gone or self._failures >= TIMEOUTS_TO_OPEN:
                self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
                self._closed_at = self._clock() + self._pause

    def answered(self) -> None:
        """There was one."""
        with self._lock:
            self._failures = 0
            self._pause = 0.0
            self._closed_at = 0.0
