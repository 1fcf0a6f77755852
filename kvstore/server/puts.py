"""The blocks of a ``Put`` on their way from a gRPC stream into their places."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import closing

from google.protobuf.message import DecodeError

from kvrelay.errors import Corrupt, DeadlineExceeded, Rejected
from kvrelay.v1 import store_pb2 as pb
from kvstore.base import Outcome, PutStatus
from kvstore.claims import Claim, Grant
from kvstore.server.block_store import BlockStore
from kvstore.wire.buffers import DATA, HEAD, ScatterBuffers, parse, skip

NO_TICKET = (1 << 64) - 1
"""Never given."""


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
    """The grant of an earlier ``Reserve``, or for ticket 0 one made in passing.

    A ticket of another tenant is as one that has ended.
    """
    if ticket == 0:
        return store.reserve(claims)
    if store.owner(ticket) != owner:
        ticket = NO_TICKET
    for index, claim in enumerate(claims):
        reserved = store.reserved(ticket, claim.name)
        if reserved is not None and reserved != claim:
            raise Rejected(f"claims[{index}]", "is not as it was reserved")
    return Grant(ticket, 0.0, (PutStatus.RESERVED,) * len(claims))


async def receive_stream(
    store: BlockStore, requests: AsyncIterator[bytes], claims: Sequence[Claim], grant: Grant
) -> list[Outcome]:
    """Read the stream to its end; an outcome for each claim.

    A writer that stands still for longer than a ticket lives is cut off: its places are wanted.
    """
    outcomes: list[Outcome] = []
    life = store.limits.ticket_life
    prolonged, now = time.monotonic(), asyncio.get_running_loop().time
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
                    if grant.ticket is not None and time.monotonic() - prolonged > life / 10:
                        prolonged = time.monotonic()
                        store.prolong(grant.ticket)
            if not pour.full:
                raise Rejected("data", "ended before the last block was whole")
    except TimeoutError as error:
        raise DeadlineExceeded(f"no byte of this Put came for {life} s") from error
    return outcomes


def _buffers(
    store: BlockStore, claims: Sequence[Claim], grant: Grant, outcomes: list[Outcome]
) -> Generator[memoryview, None, None]:
    """A buffer for each claim; when it is full, the block is checked and made visible."""
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
