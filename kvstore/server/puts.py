"""The blocks of a put on their way into their places, from a gRPC stream or a socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import closing

from google.protobuf.message import DecodeError

from kvrelay.errors import Corrupt, DeadlineExceeded, Rejected
from kvrelay.v1 import store_pb2 as pb
from kvstore.base import Outcome, PutStatus
from kvstore.claims import Claim, Grant
from kvstore.server.block_store import BlockStore
from kvstore.server.slot import WriteSlot
from kvstore.wire.buffers import DATA, HEAD, ScatterBuffers, parse, size_batches, skip
from kvstore.wire.frames import BlockRow

NO_TICKET = (1 << 64) - 1
"""A number that no ticket has."""

GROUP_BYTES = 4 << 20
GROUP_BLOCKS = 256
"""Blocks of a put over a socket are borrowed and made visible in groups of this size: the
bookkeeping of one block costs nearly as much as that of many."""

ReceiveRow = Callable[[WriteSlot | None, BlockRow], None]
"""Receives the block of a row into its slot and checks it; without a slot it is skipped."""


async def first_head(requests: AsyncIterator[bytes]) -> pb.PutHead:
    """The head of a stream, which is its first message."""
    try:
        async for message in requests:
            part, body = parse(message)
            if part == HEAD:
                return pb.PutHead.FromString(bytes(body))
            break
    except (Corrupt, DecodeError) as error:
        raise Rejected("head", str(error)) from error
    raise Rejected("head", "must be the first message of a Put")


def grant_for(store: BlockStore, ticket: int, claims: Sequence[Claim], owner: bytes) -> Grant:
    """The grant of an earlier ``Reserve``, or for ticket 0 a new one.

    A ticket of another tenant counts as ended.
    """
    if ticket == 0:
        return store.reserve(claims)
    if store.owner(ticket) != owner:
        ticket = NO_TICKET
    for index, claim in enumerate(claims):
        reserved = store.reserved_claim(ticket, claim.name)
        if reserved is not None and reserved != claim:
            raise Rejected(f"claims[{index}]", "differs from its reservation")
    return Grant(ticket, 0.0, (PutStatus.RESERVED,) * len(claims))


async def receive_stream(
    store: BlockStore, requests: AsyncIterator[bytes], claims: Sequence[Claim], grant: Grant
) -> list[Outcome]:
    """Read the stream to its end; an outcome for each claim.

    A writer that sends nothing for longer than a ticket lives is cut off: others need its places.
    """
    outcomes: list[Outcome] = []
    life = store.limits.ticket_life
    extended, now = time.monotonic(), asyncio.get_running_loop().time
    try:
        with closing(_buffers(store, claims, grant, outcomes)) as buffers:
            pour = ScatterBuffers(buffers)
            async with asyncio.timeout(life) as limit:
                async for message in requests:
                    limit.reschedule(now() + life)
                    part, body = parse(message)
                    if part != DATA:
                        raise Rejected("head", "must not be sent twice")
                    pour.feed(body)
                    if grant.ticket is not None and time.monotonic() - extended > life / 10:
                        extended = time.monotonic()
                        store.extend_ticket(grant.ticket)
            if not pour.full:
                raise Rejected("data", "ended before the last block was whole")
    except TimeoutError as error:
        raise DeadlineExceeded(f"no byte of this Put arrived for {life} s") from error
    return outcomes


def _buffers(
    store: BlockStore, claims: Sequence[Claim], grant: Grant, outcomes: list[Outcome]
) -> Generator[memoryview, None, None]:
    """A buffer for each claim; a full buffer is checked and its block made visible."""
    for claim, verdict in zip(claims, grant.verdicts, strict=True):
        if verdict is not PutStatus.RESERVED or grant.ticket is None:
            yield from skip(claim.size)
            outcomes.append(Outcome(verdict))
            continue
        slots = store.slots(grant.ticket, [claim.name])
        try:
            if (slot := slots[0]) is None:
                yield from skip(claim.size)
            else:
                yield slot.buffer
                slot.check()
        finally:
            outcomes += store.settle(slots)


def place_rows(
    store: BlockStore,
    ticket: int,
    prefix: bytes | None,
    rows: Sequence[BlockRow],
    receive: ReceiveRow,
) -> list[Outcome]:
    """Receive the blocks of a put over a socket; an outcome for each row.

    ``prefix`` is that of the ticket's owner, ``None`` if the ticket is unknown. If ``receive``
    raises, the blocks received before are visible and every other place is given back.
    """
    outcomes: list[Outcome] = []
    known, extended = prefix is not None, 0.0
    for group in size_batches(rows, GROUP_BYTES, GROUP_BLOCKS):
        names = [row.name for row in group] if not prefix else [prefix + row.name for row in group]
        slots = [None] * len(group) if prefix is None else store.slots(ticket, names)
        try:
            for slot, row in zip(slots, group, strict=True):
                if slot is not None and slot.claim.size != row.size:
                    reserved = f"the {slot.claim.size} that was reserved"
                    raise Rejected("rows.size", f"{row.size} is not {reserved}")
                if known and time.monotonic() - extended > store.limits.ticket_life / 10:
                    extended = time.monotonic()
                    store.extend_ticket(ticket)
                receive(slot, row)
        finally:
            outcomes += store.settle(slots)
    return outcomes
