"""The answers of a Redis server as they come from a pipe: lines, and bulk bytes into buffers.

Version 2 of its protocol, and of it what our commands are answered with: no arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import Corrupt
from kvblock.header import MAX_COUNT, MAX_PAYLOAD, header_bytes
from kvstore.pipe import Pipe

ROOM = 64 << 10
NIL = b"$-1"
LONGEST_LINE = 4096
LONGEST_BULK = MAX_PAYLOAD + header_bytes(MAX_COUNT)
_END = b"\r\n"


class Refused(Exception):
    """The server answered with an error, and the connection is sound."""

    def __init__(self, line: bytes) -> None:
        super().__init__(line[1:].decode("utf-8", "replace"))
        self.line = line


class Replies:
    """Of one connection, in the order of the commands."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._room = memoryview(bytearray(ROOM))
        self._start = self._end = 0

    def lines(self, count: int) -> list[bytes]:
        """The next ``count`` answers, each of one line: a status, a number, an error or nothing."""
        found: list[bytes] = []
        while len(found) < count:
            if self._start == self._end:
                self._more(ROOM)
            found += self._whole_lines(count - len(found))
        return found

    def line(self, most: int = ROOM) -> bytes:
        """The next line. So many bytes at most are read ahead of what follows it."""
        while not (found := self._whole_lines(1, most)):
            pass
        return found[0]

    def bulk(self, most: int = ROOM) -> int | None:
        """The length of the bulk that comes next, ``None`` if there is none; or ``Refused``."""
        line = self.line(most)
        if line == NIL:
            return None
        if line[:1] == b"-":
            raise Refused(line)
        if line[:1] != b"$" or not line[1:].isdigit() or len(line) > 12:
            raise Corrupt("reply", f"{line[:40]!r} is no bulk")
        length = int(line[1:])
        if length > LONGEST_BULK:
            raise Corrupt("reply", f"{length} bytes are more than the {LONGEST_BULK} of a block")
        return length

    def into(self, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers`` with a whole bulk, and pass its end."""
        end = memoryview(bytearray(2))
        rest = [self._begun(buffer) for buffer in (*buffers, end)]
        self._pipe.receive_into(rest)
        if end != _END:
            raise Corrupt("reply", f"a bulk ends with {bytes(end)!r}")

    def skip(self, length: int) -> None:
        """Pass a bulk that nobody wants."""
        scratch = memoryview(bytearray(min(length, ROOM)))
        for start in range(0, length, ROOM):
            self._pipe.receive_into([self._begun(scratch[: min(ROOM, length - start)])])
        self.into(())

    def _begun(self, buffer: memoryview) -> memoryview:
        """What is left of ``buffer`` to be received, when what was read ahead lies in it."""
        count = min(len(buffer), self._end - self._start)
        if count:
            buffer[:count] = self._room[self._start : self._start + count]
            self._start += count
        return buffer[count:]

    def _whole_lines(self, most: int, ahead: int = ROOM) -> list[bytes]:
        """Up to ``most`` lines of what has come; more is read first if there is none."""
        data = bytes(self._room[self._start : self._end])
        found = data.split(_END, most)
        rest = found.pop()
        if not found:
            if len(rest) > LONGEST_LINE:
                raise Corrupt("reply", f"a line of more than {LONGEST_LINE} bytes")
            self._more(ahead)
        self._start = self._end - len(rest) if found else self._start
        return found

    def _more(self, most: int) -> None:
        left = self._end - self._start
        if self._start:
            self._room[:left] = bytes(self._room[self._start : self._end])
            self._start, self._end = 0, left
        self._end += self._pipe.receive_some(self._room[left : left + min(most, ROOM - left)])
