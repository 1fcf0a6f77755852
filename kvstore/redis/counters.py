"""What one client of a Redis store did: Redis itself counts no blocks."""

from __future__ import annotations

import threading
from dataclasses import replace

from kvstore.stats import StoreCounters


class ClientCounters:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = StoreCounters()

    def add(self, **counts: int) -> None:
        """To the fields of a ``StoreCounters``."""
        with self._lock:
            for name, count in counts.items():
                setattr(self._counters, name, getattr(self._counters, name) + count)

    def counters(self) -> StoreCounters:
        """A copy."""
        with self._lock:
            return replace(self._counters)
