"""Blocks read from Redis servers with pipelined GETs, in the order in which they are wanted.

At most a few megabytes are in flight for each server: replies wait in the server's memory and the
kernel's until they are read, and longer pipelines of large values are slower.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence

from kvrelay.errors import DeadlineExceeded, KvrelayError
from kvstore.base import GetResult, Want
from kvstore.redis.call import ROUNDS, WRONG_TYPE, RedisCall, error_code, is_redirect
from kvstore.redis.connection import RedisConnection
from kvstore.redis.replies import ErrorReply
from kvstore.redis.server import RedisServer, ServerRefused
from kvstore.wire.copying import HASH_CHUNK, receive_block

WINDOW = 8 << 20
"""Bytes of payload in flight on one connection, if more than one block."""

LOW = WINDOW // 2
LOW_LARGE = WINDOW // 4
"""More is asked for when at most so many bytes are in flight; of blocks of 4 MiB in the middle of
one. A server copies each reply before it sends it, and two large ones at once fit in no cache."""

MOST_IN_FLIGHT = 512
"""Blocks in flight on one connection, however small they are."""

LENGTH_BYTES = 64
"""Read to learn the length of a large block; the others go into the caller's buffer at once."""

LARGE = 16 << 10


class Redirected(Exception):
    """The server that was asked for a block failed or does not have the block's slot."""


class ReadPipeline:
    """The GETs of one call to one server: those to be sent, and those in flight."""

    def __init__(self, server: RedisServer, connection: RedisConnection) -> None:
        self.server = server
        self._connection = connection
        self._waiting: deque[tuple[bytes, int]] = deque()
        self._in_flight: deque[int] = deque()
        self._bytes = 0  # of payload in flight

    def add(self, key: bytes, size: int) -> None:
        """Ask for a block with ``size`` bytes of payload after those added before."""
        self._waiting.append((key, size))

    @property
    def empty(self) -> bool:
        """Whether every block has been asked for and received."""
        return not self._in_flight and not self._waiting

    def fill(self) -> None:
        """Send GETs until the window is full. Seldom, so that many go in one packet."""
        if not self._waiting or len(self._in_flight) > MOST_IN_FLIGHT // 2:
            return
        if self._bytes > (LOW_LARGE if self._waiting[0][1] > HASH_CHUNK else LOW):
            return
        commands = []
        while self._waiting and len(self._in_flight) < MOST_IN_FLIGHT:
            key, size = self._waiting[0]
            if self._bytes and self._bytes + size > WINDOW:
                break
            self._waiting.popleft()
            self._in_flight.append(size)
            self._bytes += size
            commands.append(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
        self._connection.send(b"".join(commands))

    def receive(self, want: Want) -> tuple[bytes | None, tuple[int, ...] | None]:
        """Header and checksums (if computed) of the next block; its payload is in ``want.buffer``.

        More blocks are asked for before this one is returned.
        """
        size = self._in_flight.popleft()
        header, summed = self._receive_block(want, size)
        if not header or size <= HASH_CHUNK:
            self._arrived(size)
        return header, summed

    def _receive_block(self, want: Want, size: int) -> tuple[bytes | None, tuple[int, ...] | None]:
        replies = self._connection.replies
        try:
            length = replies.bulk(LENGTH_BYTES if size >= LARGE else LARGE)
        except ErrorReply as error:
            if error_code(error.line) == WRONG_TYPE:
                return b"", None
            raise
        if length is None:
            return None, None
        split = want.header_length(length)
        if split is None:
            replies.skip(length)
            return b"", None
        header = bytearray(split)
        summed = None
        owed = len(self._in_flight)
        if size > HASH_CHUNK:
            summed = receive_block(self._receive_chunk, memoryview(header), want.buffer, want.heads)
            replies.into(owed=owed)
        else:
            replies.into(memoryview(header), want.buffer, owed=owed)
        return bytes(header), summed

    def _receive_chunk(self, buffers: Sequence[memoryview]) -> None:
        """A chunk of a large block, after its header if it is the first."""
        self._connection.replies.begin(buffers)
        self._arrived(len(buffers[-1]))

    def _arrived(self, size: int) -> None:
        self._bytes -= size
        self.fill()


def read_blocks(call: RedisCall, wants: Sequence[Want]) -> Generator[GetResult, None, None]:
    """Each want once, in order. Raises only if no server can be asked, or no time is left."""
    done = 0
    for _ in range(ROUNDS):
        arriving = _round(call, wants, done)
        try:
            for got in arriving:
                done += 1
                yield got
            return
        except Redirected:
            if not call.retry():
                break
        finally:
            arriving.close()
    if call.deadline.expired:
        raise call.error or DeadlineExceeded("no time was left for the rest of the blocks")
    yield from (GetResult(index, None) for index in range(done, len(wants)))


def _round(call: RedisCall, wants: Sequence[Want], first: int) -> Generator[GetResult, None, None]:
    pipelines: dict[RedisServer, ReadPipeline] = {}
    order = [_add(call, pipelines, want) for want in wants[first:]]
    if order and not pipelines:
        raise call.no_server()
    server = None
    try:
        for server in pipelines:
            pipelines[server].fill()
        for index, pipeline in enumerate(order, first):
            if pipeline is None:
                yield GetResult(index, None)
                continue
            server = pipeline.server
            header, summed = pipeline.receive(wants[index])
            if pipeline.empty:
                call.answered(server)
            yield GetResult(index, header, summed)
    except (ErrorReply, KvrelayError) as error:
        if server is not None:
            _record(call, server, error)
        raise Redirected from error


def _record(call: RedisCall, server: RedisServer, error: ErrorReply | KvrelayError) -> None:
    if isinstance(error, KvrelayError):
        call.failed(server, error)
    elif is_redirect(error.line):
        call.redirected(server, error.line)
    else:
        call.failed(server, ServerRefused(server.address, error.line))


def _add(
    call: RedisCall, pipelines: dict[RedisServer, ReadPipeline], want: Want
) -> ReadPipeline | None:
    """The pipeline a want was added to; ``None`` if no server of its places is usable."""
    if (reached := call.reach(want.name)) is None:
        return None
    server, key, connection = reached
    pipeline = pipelines.get(server)
    if pipeline is None:
        pipeline = pipelines[server] = ReadPipeline(server, connection)
    pipeline.add(key, len(want.buffer))
    return pipeline
