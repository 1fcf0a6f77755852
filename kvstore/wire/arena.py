"""The header of the store's shared memory, which tells a reader whether it mapped the right one."""

from __future__ import annotations

import mmap
import struct

from kvrelay.errors import Corrupt

MAGIC = b"KVRARENA"
VERSION = 1
_HEADER = struct.Struct("<8sI4xQ16s")


def write_header(memory: mmap.mmap, boot: bytes) -> None:
    """Mark ``memory`` as the arena of the store's start ``boot``."""
    _HEADER.pack_into(memory, 0, MAGIC, VERSION, len(memory), boot)


def open_arena(fd: int, size: int, boot: bytes) -> mmap.mmap:
    """A reader's mapping; ``Corrupt`` unless it is the arena of the store's start ``boot``."""
    mapped = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    magic, version, length, start = _HEADER.unpack_from(mapped, 0)
    if (magic, version, length) != (MAGIC, VERSION, size):
        raise Corrupt("arena", f"{magic!r} version {version}, {length} bytes, is not an arena")
    if start != boot:
        raise Corrupt("arena", f"it is of start {start.hex()} and not of {boot.hex()}")
    return mapped
