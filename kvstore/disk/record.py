"""One block in a segment: a small head, then the block as it is in memory, then zeros.

Little-endian, 128 bytes::

    0 magic 8s | 8 bytes of the block u64 | 16 bytes of its key u8 | 17 key 64s | 81 zeros
    120 XXH3-64 of the bytes before, u64

The key is what the index knows the block by. The block carries its own checksums.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvrelay.errors import Corrupt

MAGIC = b"KVRDISK1"
HEAD_BYTES = 128
MAX_KEY = 64
_HEAD = struct.Struct(f"<8sQB{MAX_KEY}s39xQ")
_ZEROS = bytes(HEAD_BYTES)


@dataclass(frozen=True, slots=True)
class RecordHead:
    """What a record says of its block."""

    key: bytes
    size: int


def record_bytes(size: int) -> int:
    """What a block of ``size`` bytes takes on disk."""
    return HEAD_BYTES - (-size // HEAD_BYTES) * HEAD_BYTES


def padding(size: int) -> bytes:
    """The zeros after it."""
    return _ZEROS[: -size % HEAD_BYTES]


def encode_head(head: RecordHead) -> bytes:
    """As bytes."""
    data = _HEAD.pack(MAGIC, head.size, len(head.key), head.key, 0)
    return data[:-8] + xxhash.xxh3_64_intdigest(data[:-8]).to_bytes(8, "little")


def decode_head(data: bytes) -> RecordHead:
    """Read a head; ``Corrupt`` names what is wrong."""
    if len(data) < HEAD_BYTES:
        raise Corrupt("record", f"{len(data)} bytes are fewer than the {HEAD_BYTES} of a head")
    magic, size, length, key, checksum = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise Corrupt("record", f"{magic!r} is not {MAGIC!r}")
    if checksum != xxhash.xxh3_64_intdigest(data[: HEAD_BYTES - 8]):
        raise Corrupt("record", "the head's bytes are not those that were written")
    return RecordHead(key[:length], size)
