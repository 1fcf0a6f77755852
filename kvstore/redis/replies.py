"""Replies of a Redis server, read from a socket: lines, and bulk bytes into given buffers.

RESP version 2, without arrays: no command that is sent here is answered with one.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.block.header import LONGEST, MAX_PAYLOAD
from kvrelay.errors import Corrupt
from kvstore.wire.sockets import DeadlineSocket

BUFFER_BYTES = 64 << 10
NIL = b"$-1"
SHORTEST = len(b"$-1\r\n")
"""Bytes of the shortest reply to a ``GET``."""

AHEAD = 4 * SHORTEST
LONGEST_LINE = 4096
LONGEST_HEAD = 12
LONGEST_BULK = MAX_PAYLOAD + LONGEST
_END = b"\r\n"


class ErrorReply(Exception):
    """The server answered with an error; the connection can still be used."""

    def __init__(self, line: bytes) -> None:
        super().__init__(line[1:].decode("utf-8", "replace"))
        self.line = line


class ReplyReader:
    """Reads the replies of one connection, which come in the order of the commands."""

    def __init__(self, sock: DeadlineSocket) -> None:
        self._sock = sock
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._tail = memoryview(bytearray(len(_END)))
        self._start = 0
        self._end = 0

    def lines(self, count: int) -> list[bytes]:
        """The next ``count`` replies of one line each: a status, a number, an error or nil."""
        lines: list[bytes] = []
        while len(lines) < count:
            lines += self._whole_lines(count - len(lines), BUFFER_BYTES)
        return lines

    def bulk(self, most: int = BUFFER_BYTES) -> int | None:
        """The length of the next bulk, ``None`` for nil; raises ``ErrorReply`` for an error.

        At most ``most`` bytes are read ahead, which are copied to where they belong afterwards.
        """
        (line,) = self._whole_lines(1, most)
        if line == NIL:
            return None
        if line[:1] == b"-":
            raise ErrorReply(line)
        if line[:1] != b"$" or not line[1:].isdigit() or len(line) > LONGEST_HEAD:
            raise Corrupt("reply", f"{line[:40]!r} is no bulk")
        length = int(line[1:])
        if length > LONGEST_BULK:
            raise Corrupt("reply", f"{length} bytes are more than the {LONGEST_BULK} of a block")
        return length

    def into(self, *buffers: memoryview, owed: int = 0) -> None:
        """Fill ``buffers`` with a whole bulk, or with the rest of one, and read its end.

        With ``owed`` more replies to come, the beginning of the next one is received by the same
        system call: the reader sleeps once for a block and not twice.
        """
        views = self._unread([*buffers, self._tail])
        ahead = min(owed * SHORTEST, AHEAD) if self._start == self._end else 0
        self._sock.receive_into([*views, self._buffer[:ahead]])
        if ahead:
            self._start = 0
            self._end = ahead
        if self._tail != _END:
            raise Corrupt("reply", f"a bulk ends with {bytes(self._tail)!r}")

    def begin(self, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers`` with the beginning of a bulk; ``into`` reads the rest."""
        self._sock.receive_into(self._unread(buffers))

    def skip(self, length: int) -> None:
        """Read a bulk and drop it."""
        scratch = memoryview(bytearray(min(length, BUFFER_BYTES)))
        while length > BUFFER_BYTES:
            self.begin([scratch])
            length -= BUFFER_BYTES
        self.into(scratch[:length])

    def _unread(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        """Copy what was read ahead into ``buffers``; the parts of them that are not filled."""
        views = [*buffers]
        first = 0
        while self._start < self._end and first < len(views):
            view = views[first]
            count = min(len(view), self._end - self._start)
            view[:count] = self._buffer[self._start : self._start + count]
            self._start += count
            views[first] = view[count:]
            first += count == len(view)
        return views[first:]

    def _whole_lines(self, most: int, ahead: int) -> list[bytes]:
        """Up to ``most`` lines, at least one; only receives if the buffer holds no whole line."""
        while True:
            data = self._buffer[self._start : self._end].tobytes()
            lines = data.split(_END, most)
            rest = lines.pop()
            if lines:
                self._start = self._end - len(rest)
                return lines
            if len(rest) > LONGEST_LINE:
                raise Corrupt("reply", f"a line of more than {LONGEST_LINE} bytes")
            self._read_more(rest, ahead)

    def _read_more(self, left: bytes, most: int) -> None:
        """Receive up to ``most`` bytes after ``left``, which moves to the front of the buffer."""
        if self._start:
            self._buffer[: len(left)] = left
            self._start = 0
            self._end = len(left)
        self._end += self._sock.receive_some(self._buffer[self._end : self._end + most])
