"""The header before every stored payload: what the block is, checksums, and its fleet's tag.

Little-endian, 192 fixed bytes, then the token ids, then zeros up to a multiple of 128::

    0 magic 8s | 8 version u16 | 10 dimensions u8 | 11 zero | 12 header length u32
    16 header checksum u64 | 24 payload checksum u64 | 32 tag 16s
    48 payload length u32 | 52 count u32 | 56 dtype 16s
    72 namespace 32s | 104 parent 32s | 136 name 32s | 168 shape 6 x u32 | 192 token ids count x u32

Both checksums are XXH3-64; the header's covers every header byte but its own eight. The tag is the
MAC of header and payload by the fleet's key (``kvrelay.block.mac``), zeros without a key.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from kvrelay.errors import Corrupt

if TYPE_CHECKING:
    from kvrelay.block.mac import BlockKey

Buffer = bytes | bytearray | memoryview

MAGIC = b"KVRBLOCK"
VERSION = 2
ALIGNMENT = 128
MAX_COUNT = 1 << 16
MAX_PAYLOAD = 1 << 30
MAX_DIMENSIONS = 6
TAG_BYTES = 16
ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Element types a payload may have and their sizes in bytes."""

_FIXED = struct.Struct("<8sHBBIQQ16sII16s32s32s32s6I")
_KINDS = {dtype.encode("ascii").ljust(16, b"\0"): dtype for dtype in ITEM_BYTES}
_CHECKSUM = slice(16, 24)
_TAG_END = 48
_NO_TAG = bytes(TAG_BYTES)


@dataclass(frozen=True, slots=True)
class ExpectedBlock:
    """The block a reader expects: a header without the payload's length and checksum.

    ``tokens`` are its ``count`` token ids; ``shape`` is the payload's.
    """

    namespace: bytes
    parent: bytes
    name: bytes
    tokens: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Token positions in the block."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Header(ExpectedBlock):
    """What one stored block is."""

    payload_bytes: int
    payload_checksum: int


def checksum(data: Buffer) -> int:
    """XXH3-64 of ``data``."""
    return xxhash.xxh3_64_intdigest(data)


def header_bytes(count: int) -> int:
    """Length of the header of a block with ``count`` token positions, padding included."""
    return -(-(_FIXED.size + 4 * count) // ALIGNMENT) * ALIGNMENT


def stated_length(data: Buffer) -> int:
    """The header's length that the first bytes of a block state; not checked."""
    return int.from_bytes(data[12:16], "little")


def stated_count(data: Buffer) -> int:
    """The number of tokens that the first bytes of a block state; at most ``MAX_COUNT``."""
    return min(int.from_bytes(data[52:56], "little"), MAX_COUNT)


def stated_checksum(data: Buffer) -> int:
    """The checksum of the payload that the first bytes of a block state; not checked."""
    return int.from_bytes(data[24:32], "little")


def payload_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Length of a payload of ``shape`` elements of ``dtype``."""
    return ITEM_BYTES[dtype] * math.prod(shape)


def encode(header: Header) -> bytes:
    """The header as bytes, checksum included."""
    return encode_fields(header, header.payload_bytes, header.payload_checksum)


def encode_fields(block: ExpectedBlock, size: int, payload_checksum: int) -> bytes:
    """The header, without a tag, of a block whose payload has this size and checksum.

    The parts that most headers share are packed once.
    """
    start, kind, dimensions, words, padding = _common(block.count, block.dtype, block.shape)
    rest = b"".join(
        (
            payload_checksum.to_bytes(8, "little"),
            _NO_TAG,
            size.to_bytes(4, "little"),
            kind,
            block.namespace,
            block.parent,
            block.name,
            dimensions,
            words.pack(*block.tokens),
            padding,
        )
    )
    if len(rest) != header_bytes(block.count) - _CHECKSUM.stop:
        raise ValueError("namespace, parent and name have 32 bytes each")
    own = xxhash.xxh3_64_intdigest(start + rest)
    return b"".join((start, own.to_bytes(8, "little"), rest))


@lru_cache(maxsize=1024)
def _common(
    count: int, dtype: str, shape: tuple[int, ...]
) -> tuple[bytes, bytes, bytes, struct.Struct, bytes]:
    """The bytes before the checksum; count and dtype; shape; the tokens' struct; padding."""
    length = header_bytes(count)
    data = bytearray(length)
    dimensions = shape + (0,) * (MAX_DIMENSIONS - len(shape))
    _FIXED.pack_into(
        data,
        0,
        MAGIC,
        VERSION,
        len(shape),
        0,
        length,
        0,
        0,
        b"",
        0,
        count,
        dtype.encode("ascii"),
        b"",
        b"",
        b"",
        *dimensions,
    )
    end = _FIXED.size + 4 * count
    parts = (data[: _CHECKSUM.start], data[52:72], data[168 : _FIXED.size], data[end:])
    start, kind, shaped, padding = map(bytes, parts)
    return start, kind, shaped, _words(count), padding


@lru_cache(maxsize=1024)
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}I")


def seal(header: bytes, payload: Buffer, payload_checksum: int, key: BlockKey | None) -> bytes:
    """``header`` with what was not known when it was encoded: the payload's checksum, the tag."""
    start, rest = header[: _CHECKSUM.start], header[_TAG_END:]
    summed = payload_checksum.to_bytes(8, "little")
    tag = _NO_TAG if key is None else key.tag(b"".join((start, summed, rest)), payload)
    sealed = b"".join((summed, tag, rest))
    own = xxhash.xxh3_64_intdigest(start + sealed)
    return b"".join((start, own.to_bytes(8, "little"), sealed))


class HeaderFields(NamedTuple):
    """The consistent fields of a header; ``words`` are its token ids as bytes."""

    namespace: bytes
    parent: bytes
    name: bytes
    words: bytes
    dtype: str
    shape: tuple[int, ...]
    payload_bytes: int
    payload_checksum: int

    @property
    def positions(self) -> int:
        """Token positions in the block."""
        return len(self.words) // 4


def decode(data: Buffer) -> Header:
    """Read a header from the start of ``data``; ``Corrupt`` names the field that is wrong."""
    fields = fields_of(data)
    tokens = _words(fields.positions).unpack(fields.words)
    parent, name, dtype, shape = fields.parent, fields.name, fields.dtype, fields.shape
    size, payload = fields.payload_bytes, fields.payload_checksum
    return Header(fields.namespace, parent, name, tokens, dtype, shape, size, payload)


def fields_of(data: Buffer) -> HeaderFields:
    """``decode`` without making a number of each token id.

    Lengths are checked against the limits and against each other before anything is allocated.
    """
    if len(data) < _FIXED.size:
        raise Corrupt("header", f"{len(data)} bytes are fewer than the {_FIXED.size} fixed ones")
    (
        magic,
        version,
        dimensions,
        _,
        length,
        own,
        payload,
        _,
        size,
        count,
        dtype,
        space,
        parent,
        name,
        *shape,
    ) = _FIXED.unpack_from(data)
    _check_frame(len(data), magic, version, length, count)
    raw = bytes(data[:length])
    if own != _own_checksum(raw):
        raise Corrupt("header_checksum", "the header's bytes are not those that were written")
    kind, shaped = _dtype(dtype), tuple(shape[:dimensions])
    _check_payload(kind, dimensions, shaped, size)
    words = raw[_FIXED.size : _FIXED.size + 4 * count]
    return HeaderFields(space, parent, name, words, kind, shaped, size, payload)


def _own_checksum(data: bytes | bytearray) -> int:
    return xxhash.xxh3_64_intdigest(data[: _CHECKSUM.start] + data[_CHECKSUM.stop :])


def _check_frame(available: int, magic: bytes, version: int, length: int, count: int) -> None:
    if magic != MAGIC:
        raise Corrupt("magic", f"{magic!r} is not {MAGIC!r}")
    if version != VERSION:
        raise Corrupt("version", f"{version} is not {VERSION}")
    if count > MAX_COUNT:
        raise Corrupt("count", f"{count} is more than {MAX_COUNT}")
    if length != header_bytes(count):
        raise Corrupt(
            "header_length", f"{length} is not the {header_bytes(count)} of {count} tokens"
        )
    if length > available:
        raise Corrupt("header_length", f"{length} is more than the {available} bytes given")


def _dtype(raw: bytes) -> str:
    if (name := _KINDS.get(raw)) is None:
        said = raw.rstrip(b"\0").decode("ascii", "replace")
        raise Corrupt("dtype", f"{said!r} is none of {', '.join(ITEM_BYTES)}")
    return name


def _check_payload(dtype: str, dimensions: int, shape: tuple[int, ...], size: int) -> None:
    if dimensions > MAX_DIMENSIONS:
        raise Corrupt("shape", f"{dimensions} dimensions are more than {MAX_DIMENSIONS}")
    if size != (expected := payload_bytes(dtype, shape)):
        raise Corrupt("payload_bytes", f"{size} is not the {expected} of its shape")
    if size > MAX_PAYLOAD:
        raise Corrupt("payload_bytes", f"{size} is more than {MAX_PAYLOAD}")
