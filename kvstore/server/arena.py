"""The store's memory for blocks: one shared segment, and who may use which bytes of it.

On Linux it is a memfd sealed so that nobody but this process can ever write to it or change its
size; readers get its descriptor and map it read-only. Elsewhere it is plain memory, not shared.
The first granule says which start of the store it belongs to.
"""

from __future__ import annotations

import mmap
import struct
import sys

from kvrelay.config.values import show_size
from kvrelay.errors import Corrupt, Rejected
from kvstore.index.slots import GRANULE, SlotAllocator

MAGIC = b"KVRARENA"
VERSION = 1
_HEADER = struct.Struct("<8sI4xQ16s")

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
    """Add seals for good; false where the system does not know them."""
    if sys.platform != "linux":
        return False
    import fcntl

    try:
        fcntl.fcntl(fd, F_ADD_SEALS, seals)
    except OSError:
        return False
    return True


def capacity_for(budget: int) -> int:
    """Bytes of the segment: the budget and a little, for slots are longer than their blocks."""
    return -(-(budget + budget // 16 + (1 << 20)) // GRANULE) * GRANULE


class Arena:
    """``Room`` for blocks: a place is an offset. Not thread-safe but for ``view``.

    ``fd`` is what readers map; ``None`` if the memory cannot be shared safely.
    """

    def __init__(self, boot: bytes, capacity: int) -> None:
        self.size = GRANULE + capacity
        try:
            fd = memfd("kvrelay-arena", self.size)
            self._map = mmap.mmap(-1 if fd is None else fd, self.size)
        except (OSError, OverflowError) as error:
            size = show_size(self.size)
            raise Rejected("budget", f"{size} of memory cannot be had: {error}") from error
        self._view = memoryview(self._map)
        _HEADER.pack_into(self._map, 0, MAGIC, VERSION, self.size, boot)
        # Sealed after our own mapping, the only one that will ever be writable.
        safe = fd is not None and seal(fd, SEAL | SHRINK | GROW | FUTURE_WRITE)
        self.fd = fd if safe else None
        self.slots = SlotAllocator(capacity)

    def take(self, size: int) -> int | None:
        """As ``Room`` says."""
        offset = self.slots.take(size)
        return None if offset is None else offset + GRANULE

    def give(self, place: int, size: int) -> None:
        """As ``Room`` says."""
        self.slots.give(place - GRANULE, size)

    def view(self, place: int, size: int) -> memoryview:
        """The bytes of a place, writable."""
        return self._view[place : place + size]

    @property
    def whole(self) -> memoryview:
        """All of it."""
        return self._view


def open_arena(fd: int, size: int, boot: bytes) -> mmap.mmap:
    """A reader's mapping; ``Corrupt`` unless it is the arena of the store's start ``boot``."""
    mapped = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    magic, version, length, found = _HEADER.unpack_from(mapped, 0)
    if (magic, version, length) != (MAGIC, VERSION, size):
        raise Corrupt("arena", f"{magic!r} version {version}, {length} bytes, is not an arena")
    if found != boot:
        raise Corrupt("arena", f"it is of start {found.hex()} and not of {boot.hex()}")
    return mapped
