"""Blocks put into Redis with pipelined SETs: each is one value, set only if absent."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvrelay.block.header import checksums, fields_of
from kvrelay.block.verify import verify_payload
from kvrelay.errors import Corrupt, KvrelayError
from kvstore.base import Block, Offer, Outcome, PutStatus
from kvstore.claims import check_name
from kvstore.redis.call import ROUNDS, RedisCall, error_code, is_redirect
from kvstore.redis.connection import RedisConnection
from kvstore.redis.server import RedisServer, ServerRefused
from kvstore.redis.settings import RedisSettings

SEND_UNASKED = 64 << 10
"""Up to so many bytes in all a round trip costs more than sending in vain."""

WINDOW = 8 << 20
"""Bytes in flight on one connection, if more than one block."""

FLUSH_BYTES = 256 << 10
"""Small blocks are sent together."""

LINES = 2
"""Reply lines for each block: of its ``SET``, and of the ``PEXPIRE`` for one that existed."""


class WritePipeline:
    """The blocks of one call to one server, sent and answered in the order they were added."""

    def __init__(self, server: RedisServer, connection: RedisConnection) -> None:
        self.server = server
        self._connection = connection
        self._unsent: list[bytes | memoryview] = []
        self._unsent_bytes = 0
        self._unanswered: deque[tuple[int, int]] = deque()
        self._bytes = 0  # in flight

    @property
    def full(self) -> bool:
        """Whether a reply must be read before more is sent."""
        return self._bytes > WINDOW and len(self._unanswered) > 1

    @property
    def empty(self) -> bool:
        """Whether every reply has been read."""
        return not self._unanswered

    def add(self, index: int, key: bytes, block: Block, life: bytes) -> None:
        """Send the block of the offer ``index``, now or with the next ones."""
        named = b"$%d\r\n%b\r\n" % (len(key), key)
        lives = b"$%d\r\n%b\r\n" % (len(life), life)
        self._unsent += (
            b"*6\r\n$3\r\nSET\r\n%b$%d\r\n" % (named, block.size),
            block.header,
            block.payload,
            b"\r\n$2\r\nNX\r\n$2\r\nPX\r\n%b*3\r\n$7\r\nPEXPIRE\r\n%b%b" % (lives, named, lives),
        )
        self._unsent_bytes += block.size
        self._bytes += block.size
        self._unanswered.append((index, block.size))
        if self._unsent_bytes >= FLUSH_BYTES:
            self._flush()

    def receive(self) -> tuple[int, bytes]:
        """The index of the first offer without a reply, and the reply to its ``SET``."""
        self._flush()
        line, _ = self._connection.replies.lines(LINES)
        index, size = self._unanswered.popleft()
        self._bytes -= size
        return index, line

    def _flush(self) -> None:
        unsent = self._unsent
        self._unsent = []
        self._unsent_bytes = 0
        if unsent:
            self._connection.sock.send(unsent)


class PutOperation:
    """The offers of one call and their outcomes."""

    def __init__(self, call: RedisCall, offers: Sequence[Offer], settings: RedisSettings) -> None:
        self._call = call
        self._offers = offers
        self._settings = settings
        self._outcomes: list[Outcome | None] = [None] * len(offers)
        self._pipelines: dict[RedisServer, WritePipeline] = {}

    def run(self) -> list[Outcome]:
        """Put every offer. Raises only if no server stored or refused any of them."""
        if sum(offer.size for offer in self._offers) > SEND_UNASKED:
            self._prolong_existing()
        for _ in range(ROUNDS):
            self._round()
            if not self._pending() or not self._call.retry():
                break
        if self._offers and len(self._pending()) == len(self._offers):
            raise self._call.no_server()
        return [outcome or Outcome(PutStatus.NO_ROOM) for outcome in self._outcomes]

    def _pending(self) -> list[int]:
        return [index for index, outcome in enumerate(self._outcomes) if outcome is None]

    def _prolong_existing(self) -> None:
        """Reset the expiry of the blocks that exist; they are not sent."""

        def request(index: int, key: bytes) -> bytes:
            life = self._settings.lives(self._offers[index].partial)
            named = b"$%d\r\n%b\r\n" % (len(key), key)
            return b"*3\r\n$7\r\nPEXPIRE\r\n%b$%d\r\n%b\r\n" % (named, len(life), life)

        names = [offer.name for offer in self._offers]
        for index, answer in enumerate(self._call.ask(names, request, 1)):
            if answer == [b":1"]:
                self._outcomes[index] = Outcome(PutStatus.EXISTED)

    def _round(self) -> None:
        self._pipelines = {}
        for index in self._pending():
            self._send(index)
        for pipeline in list(self._pipelines.values()):
            self._receive(pipeline, every=True)

    def _send(self, index: int) -> None:
        offer = self._offers[index]
        if (reached := self._call.reach(offer.name)) is None:
            return
        server, key, connection = reached
        try:
            block = checked_block(offer)
        except Corrupt as error:
            self._outcomes[index] = Outcome(PutStatus.CORRUPT, str(error))
            return
        pipeline = self._pipelines.get(server)
        if pipeline is None:
            pipeline = self._pipelines[server] = WritePipeline(server, connection)
        try:
            pipeline.add(index, key, block, self._settings.lives(offer.partial))
        except KvrelayError as error:
            self._failed(pipeline, error)
            return
        self._receive(pipeline, every=False)

    def _receive(self, pipeline: WritePipeline, every: bool) -> None:
        """Read every reply, or as many as must be read before more is sent."""
        try:
            while not pipeline.empty if every else pipeline.full:
                index, line = pipeline.receive()
                self._outcomes[index] = self._outcome(pipeline, line)
        except KvrelayError as error:
            self._failed(pipeline, error)
            return
        if pipeline.empty:
            self._call.answered(pipeline.server)

    def _outcome(self, pipeline: WritePipeline, line: bytes) -> Outcome | None:
        if line == b"+OK":
            return Outcome(PutStatus.STORED)
        if line == b"$-1":
            return Outcome(PutStatus.EXISTED)
        if is_redirect(line):
            self._call.redirected(pipeline.server, line)
            return None
        if error_code(line) == "OOM":
            return Outcome(PutStatus.NO_ROOM)
        raise ServerRefused(pipeline.server.address, line)

    def _failed(self, pipeline: WritePipeline, error: KvrelayError) -> None:
        """Unanswered blocks are sent again; one that had arrived then exists."""
        self._pipelines.pop(pipeline.server, None)
        self._call.failed(pipeline.server, error)


def checked_block(offer: Offer) -> Block:
    """The block, sealed; ``Corrupt`` names the field that differs from what was offered.

    It is checked here because a Redis server cannot check a block.
    """
    block = offer.read()
    if block.size != offer.size:
        raise Corrupt("length", f"{block.size} bytes were read and {offer.size} were offered")
    summed = checksums(block.payload, block.heads)
    header = block.complete(block.payload, summed)
    fields = fields_of(header)
    check_name(offer.name, fields)
    verify_payload(fields, block.payload, summed)
    return Block(header, block.payload)
