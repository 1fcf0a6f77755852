"""What one client of a Redis store did: Redis itself counts no blocks."""

from __future__ import annotations

import threading
from dataclasses import replace

from kvstore.stats import Tally


class Counting:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tally = Tally()

    def add(self, **counts: int) -> None:
        """To the fields of a ``Tally``."""
        with self._lock:
            for name, count in counts.items():
                setattr(self._tally, name, getattr(self._tally, name) + count)

    def tally(self) -> Tally:
        """A copy."""
        with self._lock:
            return replace(self._tally)
