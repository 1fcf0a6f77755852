"""Deadlines by key, and which of them are due. No clock: time is passed in."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K", int, bytes)


class Deadlines(Generic[K]):
    """A heap whose entries can be moved and dropped, each in O(log n) amortised."""

    def __init__(self) -> None:
        self._times: dict[K, float] = {}
        self._heap: list[tuple[float, K]] = []

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, key: K) -> bool:
        return key in self._times

    def set(self, key: K, time: float) -> None:
        """Set the deadline of ``key``, replacing an earlier one."""
        self._times[key] = time
        heapq.heappush(self._heap, (time, key))
        if len(self._heap) > 2 * len(self._times) + 64:
            self._heap = [(time, key) for key, time in self._times.items()]
            heapq.heapify(self._heap)

    def drop(self, key: K) -> None:
        """Remove the deadline of ``key``; unknown keys are ignored."""
        self._times.pop(key, None)

    def next(self) -> float | None:
        """The earliest deadline."""
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def first(self) -> K | None:
        """The key with the earliest deadline."""
        return None if self.next() is None else self._heap[0][1]

    def nothing_due(self, now: float) -> bool:
        """Whether certainly nothing is due; a cheap test."""
        return not self._heap or self._heap[0][0] > now

    def due(self, now: float) -> Iterator[K]:
        """Remove and yield the keys whose deadline is ``now`` or earlier, earliest first."""
        while (earliest := self.next()) is not None and earliest <= now:
            _, key = heapq.heappop(self._heap)
            del self._times[key]
            yield key
