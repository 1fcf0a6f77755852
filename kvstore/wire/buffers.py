"""Blocks on the wire: many buffers cut into a few messages, and messages poured back into buffers.

A data message is field 2 of ``PutRequest`` and ``GetResponse`` and nothing else, so it is written
and read here by hand: the protobuf library would copy every byte twice more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvrelay.errors import Corrupt

MESSAGE_BYTES = 512 << 10
"""Bytes of blocks in one message. Larger ones fall out of the CPU's cache between two copies."""

HEAD, DATA = 1, 2
_TAGS = {0x0A: HEAD, 0x12: DATA}


def data_message(pieces: list[memoryview]) -> bytes:
    """One message of the bytes of ``pieces``."""
    return b"".join((b"\x12", _varint(sum(map(len, pieces))), *pieces))


def cut(buffers: Iterable[memoryview], limit: int = MESSAGE_BYTES) -> Iterator[bytes]:
    """The bytes of ``buffers``, one after another, as messages of at most ``limit`` bytes."""
    pieces: list[memoryview] = []
    room = limit
    for buffer in buffers:
        while len(buffer) >= room:
            pieces.append(buffer[:room])
            yield data_message(pieces)
            buffer, pieces, room = buffer[room:], [], limit
        if len(buffer):
            pieces.append(buffer)
            room -= len(buffer)
    if pieces:
        yield data_message(pieces)


def parse(message: bytes) -> tuple[int, memoryview]:
    """Which field the message is (``HEAD`` or ``DATA``) and its bytes."""
    if not message or message[0] not in _TAGS:
        raise Corrupt("part", "the message is neither a head nor data")
    length, start = _read_varint(message)
    if start + length != len(message):
        raise Corrupt("part", f"{length} bytes are announced, {len(message) - start} follow")
    return _TAGS[message[0]], memoryview(message)[start:]


class ScatterBuffers:
    """Copies bytes that come in pieces into buffers, one after another.

    ``buffers`` is advanced when its last one is full, so a generator sees each as it is complete.
    """

    def __init__(self, buffers: Iterator[memoryview]) -> None:
        self._buffers = buffers
        self._rest: memoryview | None = memoryview(b"")
        self._advance()

    @property
    def full(self) -> bool:
        """Whether every buffer is."""
        return self._rest is None

    def feed(self, piece: memoryview) -> None:
        """Copy; ``Corrupt`` when more comes than there are buffers for."""
        while len(piece):
            if self._rest is None:
                raise Corrupt("data", f"{len(piece)} bytes more than the head announced")
            count = min(len(piece), len(self._rest))
            self._rest[:count] = piece[:count]
            piece = piece[count:]
            self._rest = self._rest[count:]
            self._advance()

    def _advance(self) -> None:
        while self._rest is not None and not len(self._rest):
            self._rest = next(self._buffers, None)


def skip(length: int) -> Iterator[memoryview]:
    """Buffers for ``length`` bytes that nobody wants."""
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
