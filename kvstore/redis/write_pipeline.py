"""What one server is sent in a call, and what it has not answered yet."""

from __future__ import annotations

from collections import deque

from kvstore.base import Block
from kvstore.redis.connection import RedisConnection
from kvstore.redis.server import RedisServer

WINDOW = 8 << 20
"""Bytes sent whose answer has not been read, on one connection, if more than one block."""

FLUSH = 256 << 10
"""Small blocks are sent together."""

LINES = 2
"""Answers to a block that is sent: to its ``SET``, and to what prolongs one that existed."""


class WritePipeline:
    """Of one call; blocks are sent and answered in the order in which they were added."""

    def __init__(self, node: RedisServer, link: RedisConnection) -> None:
        self.node = node
        self._link = link
        self._unsent: list[bytes | memoryview] = []
        self._unsent_bytes = 0
        self._unanswered: deque[tuple[int, int]] = deque()
        self._under_way = 0

    @property
    def full(self) -> bool:
        """Whether an answer is to be read before more is sent."""
        return self._under_way > WINDOW and len(self._unanswered) > 1

    @property
    def empty(self) -> bool:
        """Whether every answer has been read."""
        return not self._unanswered

    def add(self, index: int, key: bytes, block: Block, life: bytes) -> None:
        """Send a block, soon: the offer of this number."""
        named = b"$%d\r\n%b\r\n" % (len(key), key)
        lives = b"$%d\r\n%b\r\n" % (len(life), life)
        self._unsent += (
            b"*6\r\n$3\r\nSET\r\n%b$%d\r\n" % (named, block.size),
            block.header,
            block.payload,
            b"\r\n$2\r\nNX\r\n$2\r\nPX\r\n%b*3\r\n$7\r\nPEXPIRE\r\n%b%b" % (lives, named, lives),
        )
        self._unsent_bytes += block.size
        self._under_way += block.size
        self._unanswered.append((index, block.size))
        if self._unsent_bytes >= FLUSH:
            self._flush()

    def take(self) -> tuple[int, bytes]:
        """The number of the first offer without an answer, and the answer."""
        self._flush()
        line, _ = self._link.replies.lines(LINES)
        index, size = self._unanswered.popleft()
        self._under_way -= size
        return index, line

    def _flush(self) -> None:
        unsent = self._unsent
        self._unsent = []
        self._unsent_bytes = 0
        if unsent:
            self._link.pipe.send(unsent)
