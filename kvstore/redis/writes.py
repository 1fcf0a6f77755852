"""Blocks on their way to the servers: each is one value, set only where there is none yet."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.block.header import checksum, fields_of, seal
from kvrelay.block.verify import verify_payload
from kvrelay.errors import Corrupt, KvrelayError, Unavailable
from kvstore.base import Block, Offer, Outcome, PutStatus
from kvstore.claims import check_name
from kvstore.redis.call import ROUNDS, RedisCall, error_code, is_redirect
from kvstore.redis.server import RedisServer, ServerRefused
from kvstore.redis.settings import RedisSettings
from kvstore.redis.write_pipeline import WritePipeline

SEND_UNASKED = 64 << 10
"""Up to so many bytes in all a round trip costs more than sending in vain."""


def checked_block(offer: Offer) -> Block:
    """The block, sealed; ``Corrupt`` names the field if it is not what it is said to be.

    Here and not at the server, which knows nothing of blocks.
    """
    block = offer.read()
    if block.size != offer.size:
        raise Corrupt("length", f"{block.size} bytes came and {offer.size} were offered")
    summed = checksum(block.payload)
    header = block.header if block.sealed else seal(block.header, summed)
    found = fields_of(header)
    check_name(offer.name, found)
    verify_payload(found, block.payload, summed)
    return Block(header, block.payload)


class PutOperation:
    """The offers of one call and their outcomes."""

    def __init__(self, call: RedisCall, offers: Sequence[Offer], settings: RedisSettings) -> None:
        self._call = call
        self._offers = offers
        self._settings = settings
        self._outcomes: list[Outcome | None] = [None] * len(offers)
        self._boxes: dict[RedisServer, WritePipeline] = {}

    def run(self) -> list[Outcome]:
        """Put everything. Raises only if no server took or refused any of it."""
        if sum(offer.size for offer in self._offers) > SEND_UNASKED:
            self._ask()
        for _ in range(ROUNDS):
            self._round()
            if not self._pending() or not self._call.again():
                break
        if self._offers and len(self._pending()) == len(self._offers):
            raise self._call.error or Unavailable("no server of the store is to be asked now")
        return [outcome or Outcome(PutStatus.NO_ROOM) for outcome in self._outcomes]

    def _pending(self) -> list[int]:
        return [index for index, outcome in enumerate(self._outcomes) if outcome is None]

    def _ask(self) -> None:
        """What is there lives on, and is not sent."""

        def prolong(index: int, key: bytes) -> bytes:
            life = self._settings.lives(self._offers[index].partial)
            return b"*3\r\n$7\r\nPEXPIRE\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (
                len(key),
                key,
                len(life),
                life,
            )

        for index, answer in enumerate(self._call.ask([o.name for o in self._offers], prolong, 1)):
            if answer == [b":1"]:
                self._outcomes[index] = Outcome(PutStatus.EXISTED)

    def _round(self) -> None:
        self._boxes = {}
        for index in self._pending():
            self._send(index)
        for box in list(self._boxes.values()):
            self._settle(box, whole=True)

    def _send(self, index: int) -> None:
        offer = self._offers[index]
        if (found := self._box(offer.name)) is None:
            return
        box, key = found
        try:
            block = checked_block(offer)
        except Corrupt as error:
            self._outcomes[index] = Outcome(PutStatus.CORRUPT, str(error))
            return
        try:
            box.add(index, key, block, self._settings.lives(offer.partial))
        except KvrelayError as error:
            self._lost(box, error)
            return
        self._settle(box, whole=False)

    def _box(self, name: bytes) -> tuple[WritePipeline, bytes] | None:
        """Where a block goes, and its key there; ``None`` if no server is there to take it."""
        while (place := self._call.place(name)) is not None:
            node, key = place
            if node not in self._boxes:
                try:
                    self._boxes[node] = WritePipeline(node, self._call.begin(node))
                except KvrelayError as error:
                    self._call.lost(node, error)
                    continue
            return self._boxes[node], key
        return None

    def _settle(self, box: WritePipeline, whole: bool) -> None:
        """Read answers: all of them, or until more may be sent."""
        try:
            while not box.empty if whole else box.full:
                index, line = box.take()
                self._outcomes[index] = self._outcome(box, line)
        except KvrelayError as error:
            self._lost(box, error)
            return
        if box.empty:
            self._call.done(box.node)

    def _outcome(self, box: WritePipeline, line: bytes) -> Outcome | None:
        if line == b"+OK":
            return Outcome(PutStatus.STORED)
        if line == b"$-1":
            return Outcome(PutStatus.EXISTED)
        if is_redirect(line):
            self._call.astray(box.node, line)
            return None
        if error_code(line) == "OOM":
            return Outcome(PutStatus.NO_ROOM)
        raise ServerRefused(box.node.address, line)

    def _lost(self, box: WritePipeline, error: KvrelayError) -> None:
        """Blocks it has not answered to are sent again; one that had arrived then exists."""
        self._boxes.pop(box.node, None)
        self._call.lost(box.node, error)
