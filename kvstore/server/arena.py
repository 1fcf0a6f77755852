"""The store's memory for blocks: one segment that local readers map.

On Linux it is a memfd, sealed so that no other process can write to it or change its size; readers
get its descriptor and map it read-only. Elsewhere it is plain memory, not shared. Its first granule
holds the header of ``kvstore.wire.arena``.
"""

from __future__ import annotations

import mmap
import sys

from kvrelay.config.values import show_size
from kvrelay.errors import Rejected
from kvstore.index.slots import GRANULE, SlotAllocator
from kvstore.wire.arena import write_header

F_ADD_SEALS = 1033
SEAL, SHRINK, GROW, FUTURE_WRITE = 1, 2, 4, 16


def memfd(name: str, size: int) -> int | None:
    """Descriptor of ``size`` bytes of shared memory that can be sealed; ``None`` off Linux."""
    if sys.platform != "linux":
        return None
    import os

    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


def seal(fd: int, seals: int) -> bool:
    """Add seals, which cannot be removed; false where the system does not support them."""
    if sys.platform != "linux":
        return False
    import fcntl

    try:
        fcntl.fcntl(fd, F_ADD_SEALS, seals)
    except OSError:
        return False
    return True


def capacity_for(budget: int) -> int:
    """Bytes of the segment: a little more than the budget, as slots are longer than blocks."""
    return -(-(budget + budget // 16 + (1 << 20)) // GRANULE) * GRANULE


class Arena:
    """A ``PlaceAllocator``: a place is an offset. Only ``view`` is thread-safe.

    ``fd`` is what readers map; ``None`` if the memory cannot be shared safely.
    """

    def __init__(self, boot: bytes, capacity: int) -> None:
        self.size = GRANULE + capacity
        try:
            fd = memfd("kvrelay-arena", self.size)
            self._map = mmap.mmap(-1 if fd is None else fd, self.size)
        except (OSError, OverflowError) as error:
            size = show_size(self.size)
            raise Rejected("budget", f"{size} of memory cannot be allocated: {error}") from error
        self._view = memoryview(self._map)
        write_header(self._map, boot)
        # Sealed after this mapping, which stays the only writable one.
        safe = fd is not None and seal(fd, SEAL | SHRINK | GROW | FUTURE_WRITE)
        self.fd = fd if safe else None
        self.slots = SlotAllocator(capacity)

    def take(self, size: int) -> int | None:
        offset = self.slots.take(size)
        return None if offset is None else offset + GRANULE

    def give(self, place: int, size: int) -> None:
        self.slots.give(place - GRANULE, size)

    def view(self, place: int, size: int) -> memoryview:
        """The bytes of a place, writable."""
        return self._view[place : place + size]

    @property
    def whole(self) -> memoryview:
        """The whole segment."""
        return self._view
