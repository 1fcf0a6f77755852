"""The answers of a Redis server as they come from a pipe: lines, and bulk bytes into buffers.

Version 2 of its protocol, and of it what our commands are answered with: no arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.block.header import MAX_COUNT, MAX_PAYLOAD, header_bytes
from kvrelay.errors import Corrupt
from kvstore.wire.sockets import DeadlineSocket

ROOM = 64 << 10
NIL = b"$-1"
SHORTEST = len(b"$-1\r\n")
"""Bytes of the shortest answer to a ``GET``."""

AHEAD = 4 * SHORTEST
LONGEST_LINE = 4096
LONGEST_HEAD = 12
LONGEST_BULK = MAX_PAYLOAD + header_bytes(MAX_COUNT)
_END = b"\r\n"


class ErrorReply(Exception):
    """The server answered with an error, and the connection is sound."""

    def __init__(self, line: bytes) -> None:
        super().__init__(line[1:].decode("utf-8", "replace"))
        self.line = line


class ReplyReader:
    """Of one connection, in the order of the commands."""

    def __init__(self, pipe: DeadlineSocket) -> None:
        self._pipe = pipe
        self._room = memoryview(bytearray(ROOM))
        self._tail = memoryview(bytearray(len(_END)))
        self._start = self._end = 0

    def lines(self, count: int) -> list[bytes]:
        """The next ``count`` answers, each of one line: a status, a number, an error or nothing."""
        found: list[bytes] = []
        while len(found) < count:
            found += self._whole_lines(count - len(found), ROOM)
        return found

    def bulk(self, most: int = ROOM) -> int | None:
        """The length of the bulk that comes next, ``None`` if there is none; or ``ErrorReply``.

        So many bytes at most are read ahead of what belongs elsewhere.
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
        """Fill ``buffers`` with a whole bulk, or with what is left of it, and pass its end.

        With ``owed`` more answers to come, each of some bytes at least, the beginning of the next
        is received in the same breath: the reader sleeps once for a block and not twice.
        """
        views = self._unread([*buffers, self._tail])
        ahead = min(owed * SHORTEST, AHEAD) if self._start == self._end else 0
        self._pipe.receive_into([*views, self._room[:ahead]])
        if ahead:
            self._start = 0
            self._end = ahead
        if self._tail != _END:
            raise Corrupt("reply", f"a bulk ends with {bytes(self._tail)!r}")

    def begin(self, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers`` with the beginning of a bulk, whose rest is still to come."""
        self._pipe.receive_into(self._unread(buffers))

    def skip(self, length: int) -> None:
        """Pass a bulk that nobody wants."""
        scratch = memoryview(bytearray(min(length, ROOM)))
        while length > ROOM:
            self.begin([scratch])
            length -= ROOM
        self.into(scratch[:length])

    def _unread(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        """What is left of ``buffers`` after what was read ahead was put there."""
        views, first = [*buffers], 0
        while self._start < self._end and first < len(views):
            view = views[first]
            count = min(len(view), self._end - self._start)
            view[:count] = self._room[self._start : self._start + count]
            self._start += count
            views[first] = view[count:]
            first += count == len(view)
        return views[first:]

    def _whole_lines(self, most: int, ahead: int) -> list[bytes]:
        """Up to ``most`` lines, at least one; what has come already is taken first."""
        while True:
            data = self._room[self._start : self._end].tobytes()
            found = data.split(_END, most)
            rest = found.pop()
            if found:
                self._start = self._end - len(rest)
                return found
            if len(rest) > LONGEST_LINE:
                raise Corrupt("reply", f"a line of more than {LONGEST_LINE} bytes")
            self._more(rest, ahead)

    def _more(self, left: bytes, most: int) -> None:
        """Read more after what is left, which moves to the front."""
        if self._start:
            self._room[: len(left)] = left
            self._start = 0
            self._end = len(left)
        self._end += self._pipe.receive_some(self._room[self._end : self._end + most])
