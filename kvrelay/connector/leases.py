"""Leases on their way back to the store, in the background and many at a time."""

from __future__ import annotations

import threading

from kvrelay.connector.counters import Meter
from kvrelay.connector.thread_pool import ThreadPool
from kvrelay.errors import KvrelayError
from kvstore import Lease, Store

TIMEOUT = 1.0


class HeldLeases:
    """Counts the leases this worker holds and returns them."""

    def __init__(self, store: Store, lane: ThreadPool, meter: Meter) -> None:
        self._store = store
        self._lane = lane
        self._meter = meter
        self._lock = threading.Lock()
        self._back: list[Lease] = []

    def took(self) -> None:
        """One more is held."""
        self._meter.add(open_leases=1)

    def give_back(self, lease: Lease | None) -> None:
        """Not needed any more; returns at once."""
        if lease is None:
            return
        with self._lock:
            self._back.append(lease)
            first = len(self._back) == 1
        if first:
            self._lane.submit(self)

    def run(self) -> None:
        """One call for all that are waiting. If it fails, they end by their deadlines."""
        if not (leases := self._taken()):
            return
        try:
            self._store.release(leases, TIMEOUT)
        except KvrelayError:
            pass
        finally:
            self._meter.add(open_leases=-len(leases))

    def give_up(self) -> None:
        """Leave them to their deadlines."""
        self._meter.add(open_leases=-len(self._taken()))

    def _taken(self) -> list[Lease]:
        with self._lock:
            leases = self._back
            self._back = []
        return leases
