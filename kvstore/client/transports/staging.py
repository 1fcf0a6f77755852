"""Blocks sent to the store on a socket connection: by a shared window, or through the socket."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing

from kvrelay.block.header import checksums
from kvstore.base import Block, Offer, Outcome
from kvstore.client.transports.base import parse_outcomes, read_blocks
from kvstore.client.transports.connection import StoreConnection
from kvstore.client.transports.grants import PutGrant, PutTicket
from kvstore.wire.copying import copy, copy_summed
from kvstore.wire.frames import BlockRow, Op, RequestFrame

FIRST_PART = 16
LEAST_BATCH = 384 << 10
MOST_BATCH = 4 << 20
"""A 16th part of a call is staged first, so that the store soon has work, and then twice as much
each time: a request costs as much as some blocks."""


def first_batch(offers: Sequence[Offer]) -> int:
    """Bytes of the first batch of a call."""
    return max(sum(offer.size for offer in offers) // FIRST_PART, LEAST_BATCH)


def batches(offers: Sequence[Offer], limit: int, half: int) -> Iterator[list[Offer]]:
    """``offers`` in order: first ``limit`` bytes, then twice as many; a longer block alone."""
    batch: list[Offer] = []
    size = 0
    for offer in offers:
        if batch and size + offer.size > min(limit, MOST_BATCH, half):
            yield batch
            batch = []
            size = 0
            limit *= 2
        batch.append(offer)
        size += offer.size
    if batch:
        yield batch


class Staging:
    """One put through a window: one half is filled while the store reads the other."""

    def __init__(self, connection: StoreConnection, window: memoryview) -> None:
        self._connection = connection
        self._window = window
        self.half = len(window) // 2
        self._pending: deque[int] = deque()
        self._outcomes: list[Outcome] = []
        self._start = 0

    def send(self, granted: PutGrant, limit: int, last: bool = True) -> None:
        """Send granted blocks, the first batch of ``limit`` bytes; ``last``: no more follow."""
        parts = list(batches(granted.wanted, limit, self.half))
        for number, batch in enumerate(parts, 1):
            if len(self._pending) == 2:  # the store still reads the half that is written next
                self._receive()
            end = last and number == len(parts)
            if batch[0].size > self.half:
                send_blocks(self._connection, granted.ticket, batch, end)
            else:
                _fill(self._connection, granted.ticket, batch, self._window, self._start, end)
            self._pending.append(len(batch))
            self._start = self.half - self._start

    def finish(self) -> Iterator[Outcome]:
        """The outcomes of every block that was sent."""
        while self._pending:
            self._receive()
        return iter(self._outcomes)

    def _receive(self) -> None:
        self._outcomes += parse_outcomes(self._connection.receive_body(), self._pending.popleft())


def _fill(
    connection: StoreConnection,
    ticket: PutTicket,
    offers: Sequence[Offer],
    window: memoryview,
    start: int,
    last: bool,
) -> None:
    """Write blocks into the window, and ask the store to read them from it."""
    rows = []
    targets = []
    for offer in offers:
        targets.append(window[start : start + offer.size])
        rows.append(BlockRow(offer.name, offer.size, start).encode())
        start += offer.size
    with closing(read_blocks(offers, targets)) as blocks:
        for block, target in zip(blocks, targets, strict=True):
            _place(block, target)
    body = b"".join(rows)
    count = len(offers)
    connection.send(
        RequestFrame(Op.STAGE, ticket.serial, ticket.proof, 0, count, len(body), last=last), body
    )


def send_blocks(
    connection: StoreConnection, ticket: PutTicket, offers: Sequence[Offer], last: bool
) -> None:
    """Send blocks through the socket."""
    body = b"".join(BlockRow(offer.name, offer.size).encode() for offer in offers)
    count = len(offers)
    connection.send(
        RequestFrame(Op.PUT, ticket.serial, ticket.proof, 0, count, len(body), last=last), body
    )
    with closing(read_blocks(offers)) as blocks:
        for block in map(Block.seal, blocks):
            connection.sock.send([block.header, block.payload])


def _place(block: Block, target: memoryview) -> None:
    split = len(block.header)
    if block.sealed:
        target[:split] = block.header
        copy(target[split:], block.payload)
    else:
        payload = target[split:]
        summed = (
            checksums(payload, block.heads)
            if block.placed
            else copy_summed(payload, block.payload, block.heads)
        )
        target[:split] = block.complete(payload, summed)
