"""Slab allocator of the arena: slots of a few sizes. Pure, no I/O.

Large slots are runs of 4 KiB granules. Small slots share slabs of 64 KiB, each of equal slots; an
empty slab is freed. Slabs are at the far end, so that they do not fragment the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from kvstore.index.runs import RunAllocator

ALIGNMENT = 128
GRANULE = 4096
SLAB = 64 << 10
SMALL = 32 << 10
"""Slots up to this size are in slabs."""


@lru_cache(maxsize=4096)
def slot_bytes(size: int) -> int:
    """Bytes of the slot for ``size``: at most an eighth more, for large slots a 32nd."""
    parts = 3 if size <= SMALL else 5
    step = max((1 << max(size - 1, 1).bit_length() - 1) >> parts, ALIGNMENT)
    rounded = -(-max(size, 1) // step) * step
    return rounded if rounded <= SMALL else -(-rounded // GRANULE) * GRANULE


@dataclass(slots=True)
class _Slab:
    """One slab: slots that were freed and, after ``fresh``, slots that were never taken."""

    start: int
    size: int
    freed: list[int] = field(default_factory=list)
    fresh: int = 0
    used: int = 0

    @property
    def full(self) -> bool:
        return not self.freed and self.fresh + self.size > SLAB

    def take(self) -> int:
        self.used += 1
        if self.freed:
            return self.freed.pop()
        self.fresh += self.size
        return self.start + self.fresh - self.size


class SlotAllocator:
    """Places for blocks in ``capacity`` bytes. A place is freed with the size it was taken with."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // GRANULE * GRANULE
        self._runs = RunAllocator(self.capacity // GRANULE)
        self._slabs: dict[int, _Slab] = {}  # by every granule in them
        self._open: dict[int, dict[int, _Slab]] = {}  # slabs with room, by slot size, then start
        self.used = 0  # bytes of slots taken

    @property
    def free_runs(self) -> int:
        """The number of free runs outside of slabs."""
        return self._runs.count

    @property
    def longest(self) -> int:
        """Bytes of the largest slot that can be taken."""
        return self._runs.longest * GRANULE

    def take(self, size: int) -> int | None:
        """Offset of a slot for ``size`` bytes; ``None`` if there is no free run as long."""
        slot = slot_bytes(size)
        offset = self._take_small(slot) if slot <= SMALL else self._take_large(slot)
        if offset is not None:
            self.used += slot
        return offset

    def give(self, offset: int, size: int) -> None:
        """Free the slot of ``size`` bytes at ``offset``."""
        slot = slot_bytes(size)
        self.used -= slot
        if slot > SMALL:
            self._runs.give(offset // GRANULE, slot // GRANULE)
            return
        slab = self._slabs[offset // GRANULE]
        slab.used -= 1
        slab.freed.append(offset)
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
