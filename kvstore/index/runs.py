"""Best-fit allocator of runs of equal granules; freed runs are merged with their neighbours.

Pure. A run is taken where it leaves the smallest rest, so that a heap whose blocks have few sizes
gives the same places again and again.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class RunAllocator:
    """Granules ``0 .. total - 1``, free at first. Calls cost O(log n) and a short ``memmove``."""

    def __init__(self, total: int) -> None:
        self._length: dict[int, int] = {}  # of the free run that starts here
        self._start: dict[int, int] = {}  # of the free run that ends before here
        self._by_length: list[tuple[int, int]] = []
        self._by_start: list[int] = []
        self.free = 0
        if total:
            self._add(0, total)

    @property
    def count(self) -> int:
        """The number of free runs: 1 when nothing is taken."""
        return len(self._by_length)

    @property
    def longest(self) -> int:
        """Granules of the longest free run."""
        return self._by_length[-1][0] if self._by_length else 0

    def take(self, count: int) -> int | None:
        """The start of a run of ``count`` granules, ``None`` if no free run is as long."""
        index = bisect_left(self._by_length, (count, 0))
        if index == len(self._by_length):
            return None
        length, start = self._by_length[index]
        self._remove(start)
        if length > count:
            self._add(start + count, length - count)
        return start

    def take_last(self, count: int) -> int | None:
        """The same from the far end, apart from runs that are allocated whole."""
        for start in reversed(self._by_start):
            if (length := self._length[start]) >= count:
                self._remove(start)
                if length > count:
                    self._add(start, length - count)
                return start + length - count
        return None

    def give(self, start: int, count: int) -> None:
        """Free a run and merge it with adjacent free runs."""
        after = self._length.get(start + count)
        if after is not None:
            self._remove(start + count)
            count += after
        before = self._start.get(start)
        if before is not None:
            count += self._length[before]
            self._remove(before)
            start = before
        self._add(start, count)

    def _add(self, start: int, length: int) -> None:
        self._length[start] = length
        self._start[start + length] = start
        insort(self._by_length, (length, start))
        insort(self._by_start, start)
        self.free += length

    def _remove(self, start: int) -> None:
        length = self._length.pop(start)
        del self._start[start + length]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        del self._by_start[bisect_left(self._by_start, start)]
        self.free -= length
