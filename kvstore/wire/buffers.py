"""Blocks in gRPC messages: many buffers cut into a few messages, and messages copied into buffers.

A data message is field 2 of ``PutRequest`` and ``GetResponse`` and nothing else, so it is written
and read here by hand: the protobuf library would copy every byte twice more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from kvrelay.errors import Corrupt

MESSAGE_BYTES = 512 << 10
"""Bytes of blocks in one message. Larger ones fall out of the CPU's cache between two copies."""

HEAD, DATA = 1, 2
_TAGS = {0x0A: HEAD, 0x12: DATA}


def data_message(parts: list[memoryview]) -> bytes:
    """One message of the bytes of ``parts``."""
    return b"".join((b"\x12", _varint(sum(map(len, parts))), *parts))


def data_messages(buffers: Iterable[memoryview], limit: int = MESSAGE_BYTES) -> Iterator[bytes]:
    """The bytes of ``buffers``, one after another, as messages of at most ``limit`` bytes."""
    parts: list[memoryview] = []
    room = limit
    for buffer in buffers:
        while len(buffer) >= room:
            parts.append(buffer[:room])
            yield data_message(parts)
            buffer = buffer[room:]
            parts = []
            room = limit
        if len(buffer):
            parts.append(buffer)
            room -= len(buffer)
    if parts:
        yield data_message(parts)


def parse(message: bytes) -> tuple[int, memoryview]:
    """Which field the message is (``HEAD`` or ``DATA``) and its bytes."""
    if not message or message[0] not in _TAGS:
        raise Corrupt("part", "the message is neither a head nor data")
    length, start = _read_varint(message)
    if start + length != len(message):
        raise Corrupt("part", f"{length} bytes are announced, {len(message) - start} follow")
    return _TAGS[message[0]], memoryview(message)[start:]


class ScatterBuffers:
    """Copies received bytes into buffers, one after another.

    The next of ``buffers`` is taken when the last one is full: a generator can then use that one.
    """

    def __init__(self, buffers: Iterator[memoryview]) -> None:
        self._buffers = buffers
        self._rest: memoryview | None = memoryview(b"")
        self._advance()

    @property
    def full(self) -> bool:
        """Whether every buffer is full."""
        return self._rest is None

    def feed(self, data: memoryview) -> None:
        """Copy ``data``; ``Corrupt`` if it does not fit into the buffers that are left."""
        while len(data):
            if self._rest is None:
                raise Corrupt("data", f"{len(data)} bytes more than the head announced")
            count = min(len(data), len(self._rest))
            self._rest[:count] = data[:count]
            data = data[count:]
            self._rest = self._rest[count:]
            self._advance()

    def _advance(self) -> None:
        while self._rest is not None and not len(self._rest):
            self._rest = next(self._buffers, None)


def skip(length: int) -> Iterator[memoryview]:
    """Buffers for ``length`` bytes that are received and dropped."""
    scratch = memoryview(bytearray(min(length, 1 << 16)))
    while length:
        part = scratch[:length]
        yield part
        length -= len(part)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes) -> tuple[int, int]:
    """The number that starts at byte 1, and where it ends."""
    value = 0
    for index, byte in enumerate(message[1:11]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, index + 2
    raise Corrupt("part", "its length is no number")


class Sized(Protocol):
    """A block, an offer or a row: ``size`` is in bytes."""

    @property
    def size(self) -> int: ...


S = TypeVar("S", bound=Sized)


def size_batches(items: Iterable[S], most_bytes: int, most: int) -> Iterator[list[S]]:
    """``items`` in order, in batches of at most so many bytes and so many items.

    An item that is larger than ``most_bytes`` is a batch by itself.
    """
    batch: list[S] = []
    size = 0
    for item in items:
        if batch and (size + item.size > most_bytes or len(batch) == most):
            yield batch
            batch = []
            size = 0
        batch.append(item)
        size += item.size
    if batch:
        yield batch
