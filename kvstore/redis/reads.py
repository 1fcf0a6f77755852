"""Blocks on their way from the servers, in the order in which they are wanted.

Each server has a few megabytes of them under way, no more: its answers wait in its own memory and
in the kernel's until their turn, and pipelines of large values that are longer become slower.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence

from kvrelay.errors import DeadlineExceeded, KvrelayError, Unavailable
from kvstore.base import GetResult, Want
from kvstore.client.transports.base import header_length
from kvstore.redis.call import NO_VALUE, ROUNDS, RedisCall, error_code, is_redirect
from kvstore.redis.connection import RedisConnection
from kvstore.redis.replies import ErrorReply
from kvstore.redis.server import RedisServer, ServerRefused
from kvstore.wire.copying import HASH_CHUNK, receive_summed

WINDOW = 8 << 20
"""Bytes of payload asked for and not yet received, on one connection, if more than one block."""

LOW, LOW_LARGE = WINDOW // 2, WINDOW // 4
"""More is asked for when no more than these are to come; of blocks of 4 MiB in the middle of one. A
server copies each answer before it sends it, and two large ones at once lie in no cache."""

MOST_ASKED = 512
"""And blocks, however small they are."""

AHEAD = 64
"""Bytes read to learn the length of a large block; all others go where they belong at once."""

LARGE = 16 << 10


class Redirected(Exception):
    """The server that was asked for a block is gone or has not got its slot."""


class ReadPipeline:
    """What one server is asked for in a call, and what it owes."""

    def __init__(self, node: RedisServer, link: RedisConnection) -> None:
        self.node = node
        self._link = link
        self._waiting: deque[tuple[bytes, int]] = deque()
        self._asked: deque[int] = deque()
        self._under_way = 0

    def add(self, key: bytes, size: int) -> None:
        """Ask for a block with ``size`` bytes of payload, in its turn."""
        self._waiting.append((key, size))

    @property
    def empty(self) -> bool:
        """Whether nothing is owed or to be asked."""
        return not self._asked and not self._waiting

    def pump(self) -> None:
        """Ask for as much as may be under way; seldom, so that many questions go in one piece."""
        if not self._waiting or len(self._asked) > MOST_ASKED // 2:
            return
        if self._under_way > (LOW_LARGE if self._waiting[0][1] > HASH_CHUNK else LOW):
            return
        commands = []
        while self._waiting and len(self._asked) < MOST_ASKED:
            key, size = self._waiting[0]
            if self._under_way and self._under_way + size > WINDOW:
                break
            self._waiting.popleft()
            self._asked.append(size)
            self._under_way += size
            commands.append(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
        self._link.ask(b"".join(commands))

    def take(self, want: Want) -> tuple[bytes | None, int | None]:
        """Header and checksum (if computed) of the next block; its payload is in its buffer then.

        The server is asked for more before anybody looks at what came.
        """
        size = self._asked.popleft()
        header, summed = self._received(want, size)
        if summed is None:
            self._came(size)
        return header, summed

    def _receive(self, buffers: Sequence[memoryview]) -> None:
        """A piece of a large block, with its header before the first."""
        self._link.replies.begin(buffers)
        self._came(len(buffers[-1]))

    def _came(self, size: int) -> None:
        self._under_way -= size
        self.pump()

    def _received(self, want: Want, size: int) -> tuple[bytes | None, int | None]:
        replies = self._link.replies
        try:
            length = replies.bulk(AHEAD if size >= LARGE else LARGE)
        except ErrorReply as refusal:
            if error_code(refusal.line) == NO_VALUE:
                return None, None
            raise
        if length is None:
            return None, None
        split = header_length(length, want)
        if split is None:
            replies.skip(length)
            return None, None
        header, summed, owed = bytearray(split), None, len(self._asked)
        if size > HASH_CHUNK:
            summed = receive_summed(self._receive, memoryview(header), want.buffer)
            replies.into(owed=owed)
        else:
            replies.into(memoryview(header), want.buffer, owed=owed)
        return bytes(header), summed


def read_blocks(call: RedisCall, wants: Sequence[Want]) -> Generator[GetResult, None, None]:
    """Each want once, in order. Raises only if no server is there to be asked, or no time left."""
    done = 0
    for _ in range(ROUNDS):
        arriving = _round(call, wants, done)
        try:
            for got in arriving:
                done += 1
                yield got
            return
        except Redirected:
            if not call.again():
                break
        finally:
            arriving.close()
    if call.deadline.expired:
        raise call.error or DeadlineExceeded("no time was left for the rest of the blocks")
    yield from (GetResult(index, None) for index in range(done, len(wants)))


def _round(call: RedisCall, wants: Sequence[Want], first: int) -> Generator[GetResult, None, None]:
    queues: dict[RedisServer, ReadPipeline] = {}
    order = [_queued(call, queues, want) for want in wants[first:]]
    if order and not queues:
        raise call.error or Unavailable("no server of the store is to be asked now")
    node = None
    try:
        for node in queues:
            queues[node].pump()
        for index, queue in enumerate(order, first):
            if queue is None:
                yield GetResult(index, None)
                continue
            node = queue.node
            header, summed = queue.take(wants[index])
            if queue.empty:
                call.done(node)
            yield GetResult(index, header, summed)
    except (ErrorReply, KvrelayError) as error:
        if node is not None:
            _blame(call, node, error)
        raise Redirected from error


def _blame(call: RedisCall, node: RedisServer, error: ErrorReply | KvrelayError) -> None:
    if isinstance(error, KvrelayError):
        call.lost(node, error)
    elif is_redirect(error.line):
        call.astray(node, error.line)
    else:
        call.lost(node, ServerRefused(node.address, error.line))


def _queued(
    call: RedisCall, queues: dict[RedisServer, ReadPipeline], want: Want
) -> ReadPipeline | None:
    """The queue a want was added to; ``None`` if no server that might have it is there."""
    while (place := call.place(want.name)) is not None:
        node, key = place
        queue = queues.get(node)
        if queue is None:
            try:
                queue = queues[node] = ReadPipeline(node, call.begin(node))
            except KvrelayError as error:
                call.lost(node, error)
                continue
        queue.add(key, len(want.buffer))
        return queue
    return None
