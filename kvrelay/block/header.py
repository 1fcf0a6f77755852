"""The header before every stored payload: what the block is, checksums, and its fleet's tags.

Little-endian: 192 fixed bytes, a seal for each head, token ids, zeros up to a multiple of 128::

    0 magic 8s | 8 version u16 | 10 dimensions u8 | 11 zero | 12 header length u32
    16 header checksum u64 | 24 zero u64 | 32 tag 16s
    48 payload length u32 | 52 count u32 | 56 dtype 16s
    72 namespace 32s | 104 parent 32s | 136 name 32s | 168 shape 6 x u32
    192 heads x (checksum u64, tag 16s) | 192 + 24 x heads: token ids count x u32

The payload's first dimension is its kv heads, so each head is one range of bytes, sealed by itself.
Checksums are XXH3-64; the header's covers every header byte but its own eight. The tags are MACs
by the fleet's key (``kvrelay.block.mac``), zeros without a key.
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
VERSION = 3
ALIGNMENT = 128
MAX_COUNT = 1 << 16
MAX_PAYLOAD = 1 << 30
MAX_DIMENSIONS = 6
MAX_HEADS = 256
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

_FIXED = struct.Struct("<8sHBBIQ8x16sII16s32s32s32s6I")
_KINDS = {dtype.encode("ascii").ljust(16, b"\0"): dtype for dtype in ITEM_BYTES}
_CHECKSUM = slice(16, 24)
_TAG = slice(32, 48)
_SHAPE = 168
_SEAL_BYTES = 24
_NO_TAG = bytes(TAG_BYTES)
_NOTHING_AND_NO_TAG = bytes(_TAG.stop - _CHECKSUM.stop)


@dataclass(frozen=True, slots=True)
class ExpectedBlock:
    """The block a reader expects: a header without the payload's length and checksums.

    ``tokens`` are its ``count`` token ids; ``shape`` is the payload's, kv heads first.
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

    @property
    def heads(self) -> int:
        """KV heads in the payload."""
        return self.shape[0]


@dataclass(frozen=True, slots=True)
class Header(ExpectedBlock):
    """What one stored block is."""

    payload_bytes: int
    checksums: tuple[int, ...]

    @property
    def length(self) -> int:
        """Bytes of the header."""
        return header_bytes(self.count, self.heads)


def checksum(data: Buffer) -> int:
    """XXH3-64 of ``data``."""
    return xxhash.xxh3_64_intdigest(data)


def checksums(payload: Buffer, heads: int) -> tuple[int, ...]:
    """The checksum of each head of a payload."""
    return tuple(map(xxhash.xxh3_64_intdigest, split_heads(payload, heads)))


def split_heads(payload: Buffer, heads: int) -> list[memoryview]:
    """The bytes of each head; the last is shorter if the length is no multiple of ``heads``."""
    view = memoryview(payload)
    if heads == 1:
        return [view]
    size = -(-len(view) // heads)
    return [view[head * size : (head + 1) * size] for head in range(heads)]


def header_bytes(count: int, heads: int) -> int:
    """Length of the header of ``count`` token positions and ``heads`` KV heads, with padding."""
    return -(-(_FIXED.size + _SEAL_BYTES * heads + 4 * count) // ALIGNMENT) * ALIGNMENT


SHORTEST = header_bytes(0, 1)
LONGEST = header_bytes(MAX_COUNT, MAX_HEADS)
"""Bounds of a header's length."""


def stated_length(data: Buffer) -> int:
    """The header's length that the first bytes of a block state; not checked."""
    return int.from_bytes(data[12:16], "little")


def stated_count(data: Buffer) -> int:
    """The number of tokens that the first bytes of a block state; at most ``MAX_COUNT``."""
    return min(int.from_bytes(data[52:56], "little"), MAX_COUNT)


def stated_heads(data: Buffer) -> int:
    """The number of heads that the first bytes of a block state, within 1 .. ``MAX_HEADS``."""
    stated = int.from_bytes(data[_SHAPE : _SHAPE + 4], "little")
    return min(max(stated, 1), MAX_HEADS)


def stated_checksums(data: Buffer, heads: int) -> tuple[int, ...]:
    """The checksums of ``heads`` heads that the header states; not checked."""
    return _sums(heads).unpack(_stated_table(data, heads))


def stated_tags(data: Buffer, heads: int) -> tuple[bytes, ...]:
    """The tags of ``heads`` heads that the header states; not checked."""
    return _seals(heads).unpack(_stated_table(data, heads))[1::2]


def _stated_table(data: Buffer, heads: int) -> bytes:
    """The seals; zeros where the header is too short."""
    size = _SEAL_BYTES * heads
    return bytes(data[_FIXED.size : _FIXED.size + size]).ljust(size, b"\0")


def payload_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Length of a payload of ``shape`` elements of ``dtype``."""
    return ITEM_BYTES[dtype] * math.prod(shape)


def encode(header: Header) -> bytes:
    """The header as bytes, checksum included; without tags."""
    return encode_fields(header, header.payload_bytes, header.checksums)


def encode_fields(
    block: ExpectedBlock, size: int, summed: Sequence[int] | None, tags: Sequence[bytes] = ()
) -> bytes:
    """The header, without its tag, of a block of ``size`` payload bytes.

    ``summed`` are the checksums of its heads, ``None`` if they are not known yet; ``tags`` are the
    tags of its heads. The parts that most headers share are packed once.
    """
    start, kind, dimensions, words, padding = _common(block.count, block.dtype, block.shape)
    heads = block.heads
    rest = b"".join(
        (
            _NOTHING_AND_NO_TAG,
            size.to_bytes(4, "little"),
            kind,
            block.namespace,
            block.parent,
            block.name,
            dimensions,
            bytes(_SEAL_BYTES * heads) if summed is None else _table(summed, tags),
            words.pack(*block.tokens),
            padding,
        )
    )
    if len(rest) != header_bytes(block.count, heads) - _CHECKSUM.stop:
        raise ValueError("namespace, parent and name have 32 bytes each; each head has a checksum")
    own = xxhash.xxh3_64_intdigest(start + rest)
    return b"".join((start, own.to_bytes(8, "little"), rest))


def _table(summed: Sequence[int], tags: Sequence[bytes]) -> bytes:
    """The seals of the heads; without tags, zeros stand for them."""
    if not tags:
        return _sums(len(summed)).pack(*summed)
    fields: list[int | bytes] = [0] * (2 * len(summed))
    fields[::2] = summed
    fields[1::2] = tags
    return _seals(len(summed)).pack(*fields)


@lru_cache
def _seals(heads: int) -> struct.Struct:
    return struct.Struct("<" + heads * "Q16s")


@lru_cache
def _sums(heads: int) -> struct.Struct:
    return struct.Struct("<" + heads * "Q16x")


@lru_cache(maxsize=1024)
def _common(
    count: int, dtype: str, shape: tuple[int, ...]
) -> tuple[bytes, bytes, bytes, struct.Struct, bytes]:
    """The bytes before the checksum; count and dtype; shape; the tokens' struct; padding."""
    if not shape or not 1 <= shape[0] <= MAX_HEADS:
        raise ValueError(f"{shape} has no number of heads in 1 .. {MAX_HEADS}")
    length = header_bytes(count, shape[0])
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
        b"",
        0,
        count,
        dtype.encode("ascii"),
        b"",
        b"",
        b"",
        *dimensions,
    )
    end = _FIXED.size + _SEAL_BYTES * shape[0] + 4 * count
    parts = (data[: _CHECKSUM.start], data[52:72], data[_SHAPE : _FIXED.size], data[end:])
    start, kind, shaped, padding = map(bytes, parts)
    return start, kind, shaped, _words(count), padding


@lru_cache(maxsize=1024)
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}I")


def seal(header: bytes, payload: Buffer, summed: Sequence[int], key: BlockKey | None) -> bytes:
    """``header`` with what was not known when it was encoded: checksums of the heads, and tags."""
    heads = len(summed)
    table = _table(summed, () if key is None else key.head_tags(payload, heads))
    tokens = _FIXED.size + len(table)
    return _signed(header, b"".join((header[_TAG.stop : _FIXED.size], table, header[tokens:])), key)


def seal_header(header: bytes, key: BlockKey) -> bytes:
    """``header``, whose heads are sealed, with its tag."""
    return _signed(header, header[_TAG.stop :], key)


def _signed(header: bytes, rest: bytes, key: BlockKey | None) -> bytes:
    """The header of these bytes before its checksum and after its tag."""
    start, zero = header[: _CHECKSUM.start], header[_CHECKSUM.stop : _TAG.start]
    tag = _NO_TAG if key is None else key.header_tag(b"".join((start, zero, rest)))
    sealed = b"".join((zero, tag, rest))
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
    checksums: tuple[int, ...]

    @property
    def positions(self) -> int:
        """Token positions in the block."""
        return len(self.words) // 4

    @property
    def heads(self) -> int:
        """KV heads in the payload."""
        return self.shape[0]

    @property
    def length(self) -> int:
        """Bytes of the header."""
        return header_bytes(self.positions, self.heads)


def decode(data: Buffer) -> Header:
    """Read a header from the start of ``data``; ``Corrupt`` names the field that is wrong."""
    fields = fields_of(data)
    tokens = _words(fields.positions).unpack(fields.words)
    parent, name, dtype, shape = fields.parent, fields.name, fields.dtype, fields.shape
    size, summed = fields.payload_bytes, fields.checksums
    return Header(fields.namespace, parent, name, tokens, dtype, shape, size, summed)


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
        _,
        size,
        count,
        dtype,
        space,
        parent,
        name,
        *shape,
    ) = _FIXED.unpack_from(data)
    _check_frame(len(data), magic, version, length, (count, dimensions, shape[0]))
    raw = bytes(data[:length])
    if own != _own_checksum(raw):
        raise Corrupt("header_checksum", "the header's bytes are not those that were written")
    kind, shaped = _dtype(dtype), tuple(shape[:dimensions])
    _check_payload(kind, dimensions, shaped, size)
    tokens = _FIXED.size + _SEAL_BYTES * shape[0]
    words = raw[tokens : tokens + 4 * count]
    summed = stated_checksums(raw, shape[0])
    return HeaderFields(space, parent, name, words, kind, shaped, size, summed)


def _own_checksum(data: bytes | bytearray) -> int:
    return xxhash.xxh3_64_intdigest(data[: _CHECKSUM.start] + data[_CHECKSUM.stop :])


def _check_frame(
    available: int, magic: bytes, version: int, length: int, sizes: tuple[int, int, int]
) -> None:
    count, dimensions, heads = sizes
    if magic != MAGIC:
        raise Corrupt("magic", f"{magic!r} is not {MAGIC!r}")
    if version != VERSION:
        raise Corrupt("version", f"{version} is not {VERSION}")
    if count > MAX_COUNT:
        raise Corrupt("count", f"{count} is more than {MAX_COUNT}")
    if not dimensions or not 1 <= heads <= MAX_HEADS:
        raise Corrupt("shape", f"{heads} heads are not in 1 .. {MAX_HEADS}")
    if length != (right := header_bytes(count, heads)):
        raise Corrupt("header_length", f"{length} is not the {right} of {count} tokens")
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
