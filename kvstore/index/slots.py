"""Which bytes of the arena belong to which block: slots of a few sizes. Pure, no I/O.

Large slots are runs of 4 KiB granules. Small ones share slabs of 64 KiB, each of equal slots; a
slab that is empty goes back to the heap. Slabs lie at the far end, so they do not cut up the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from kvstore.index.runs import RunAllocator

ALIGNMENT = 128
GRANULE = 4096
SLAB = 64 << 10
SMALL = 32 << 10
"""Slots up to this size are kept in slabs."""


@lru_cache(maxsize=4096)
def slot_bytes(size: int) -> int:
    """Bytes of the slot for ``size``: at most an eighth more, for large ones a 32nd."""
    parts = 3 if size <= SMALL else 5
    step = max((1 << max(size - 1, 1).bit_length() - 1) >> parts, ALIGNMENT)
    rounded = -(-max(size, 1) // step) * step
    return rounded if rounded <= SMALL else -(-rounded // GRANULE) * GRANULE


@dataclass(slots=True)
class _Slab:
    """One slab: slots given back and, after ``fresh``, those never taken."""

    start: int
    size: int
    back: list[int] = field(default_factory=list)
    fresh: int = 0
    used: int = 0

    @property
    def full(self) -> bool:
        return not self.back and self.fresh + self.size > SLAB

    def take(self) -> int:
        self.used += 1
        if self.back:
            return self.back.pop()
        self.fresh += self.size
        return self.start + self.fresh - self.size


class SlotAllocator:
    """Places for blocks in ``capacity`` bytes. What is taken is given back with the same size."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // GRANULE * GRANULE
        self._runs = RunAllocator(self.capacity // GRANULE)
        self._slabs: dict[int, _Slab] = {}  # by every granule they cover
        self._open: dict[int, dict[int, _Slab]] = {}  # by slot size, then start: not full
        self.used = 0  # bytes of slots taken

    @property
    def free_runs(self) -> int:
        """Pieces the free memory outside of slabs is in."""
        return self._runs.count

    @property
    def longest(self) -> int:
        """Bytes of the largest slot there is room for."""
        return self._runs.longest * GRANULE

    def take(self, size: int) -> int | None:
        """Offset of a slot for ``size`` bytes; ``None`` when there is no room in one piece."""
        slot = slot_bytes(size)
        offset = self._take_small(slot) if slot <= SMALL else self._take_large(slot)
        if offset is not None:
            self.used += slot
        return offset

    def give(self, offset: int, size: int) -> None:
        """Give the slot of ``size`` bytes at ``offset`` back."""
        slot = slot_bytes(size)
        self.used -= slot
        if slot > SMALL:
            self._runs.give(offset // GRANULE, slot // GRANULE)
            return
        slab = self._slabs[offset // GRANULE]
        slab.used -= 1
        slab.back.append(offset)
        self._open.setdefault(slot, {})[slab.start] = slab
        if slab.used == 0:
            self._drop(slab)

    def _take_large(self, slot: int) -> int | None:
        start = self._runs.take(slot // GRANULE)
        return None if start is None else start * GRANULE

    def _take_small(self, slot: int) -> int | None:
        slabs = self._open.get(slot)
        slab = next(iter(slabs.values())) if slabs else self._new_slab(slot)
        if slab is None:
            return None
        offset = slab.take()
        if slab.full:
            del self._open[slot][slab.start]
        return offset

    def _new_slab(self, slot: int) -> _Slab | None:
        first = self._runs.take_last(SLAB // GRANULE)
        if first is None:
            return None
        slab = _Slab(first * GRANULE, slot)
        self._slabs.update(dict.fromkeys(range(first, first + SLAB // GRANULE), slab))
        self._open.setdefault(slot, {})[slab.start] = slab
        return slab

    def _drop(self, slab: _Slab) -> None:
        first = slab.start // GRANULE
        for granule in range(first, first + SLAB // GRANULE):
            del self._slabs[granule]
        del self._open[slab.size][slab.start]
        self._runs.give(first, SLAB // GRANULE)
