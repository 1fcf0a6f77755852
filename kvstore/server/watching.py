"""``Watch``: events as they come, and a snapshot for whoever is new or was away for too long.

What waits for a reader is one message and, while it gets a snapshot, the list of blocks; the events
themselves are kept once for all, and for so long. Who does not keep up is cut off and told so.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

from kvrelay.errors import Exhausted
from kvrelay.v1 import store_pb2 as pb
from kvstore.claims import name_of
from kvstore.index.entries import IndexEntry
from kvstore.index.events import RemovalReason
from kvstore.server.block_store import BlockStore
from kvstore.server.responses import PAGE, block_info, info_pages

_TOO_SLOW = "more came after event {} than is kept: watch anew"
MOST_EVENTS = 1000
"""In one message."""

REASONS: dict[RemovalReason, pb.Removal.ValueType] = {
    RemovalReason.EVICTED: pb.REMOVAL_EVICTED,
    RemovalReason.EXPIRED: pb.REMOVAL_EXPIRED,
    RemovalReason.CLEARED: pb.REMOVAL_CLEARED,
    RemovalReason.CORRUPT: pb.REMOVAL_CORRUPT,
}


class WatchStream(Protocol):
    """What is asked of a call's context."""

    async def write(self, message: pb.WatchResponse, /) -> None:
        """Returns when there is room for the next message."""


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """Seconds. What gathers in ``interval`` is told at once."""

    interval: float = 0.05
    silence: float = 5.0  # then an empty message says that all is told
    stuck: float = 30.0  # a reader that takes no message for so long is cut off


class WatchServer:
    """Serves at most ``most`` calls at once."""

    def __init__(self, store: BlockStore, pace: WatchOptions | None = None, most: int = 64) -> None:
        self._store = store
        self._pace = pace or WatchOptions()
        self._most = most
        self.count = 0

    async def serve(self, request: pb.WatchRequest, context: WatchStream) -> None:
        """Until the client leaves or is cut off with ``Exhausted``."""
        if self.count == self._most:
            raise Exhausted("too many watch this store", retry_after=10.0)
        self.count += 1
        try:
            known = request.boot == self._store.boot
            at = request.sequence if known else None
            if at is None or self._store.events(at, 0) is None:
                at = await self._tell_all(context)
            await self._follow(at, context)
        finally:
            self.count -= 1

    async def _tell_all(self, context: WatchStream) -> int:
        last, entries = await asyncio.to_thread(self._store.snapshot)
        first = True
        for blocks in info_pages(self._store, iter(entries)):
            page = pb.SnapshotPage(first=first, last=len(blocks) < PAGE, blocks=blocks)
            await self._write(context, pb.WatchResponse(sequence=last, page=page))
            first = False
            if self._store.events(last, 0) is None:  # nor would the list be let go for hours
                raise Exhausted(_TOO_SLOW.format(last), 1.0)
        return last

    async def _follow(self, at: int, context: WatchStream) -> None:
        said = 0.0
        while True:
            told = self._store.events(at, MOST_EVENTS)
            if told is None:
                raise Exhausted(_TOO_SLOW.format(at), 1.0)
            now = time.monotonic()
            if told or now - said >= self._pace.silence:
                at, said = at + len(told), now
                events = pb.BlockEvents(events=(self._event(*one) for one in told))
                await self._write(context, pb.WatchResponse(sequence=at, events=events))
            if len(told) < MOST_EVENTS:
                await asyncio.sleep(self._pace.interval)

    async def _write(self, context: WatchStream, message: pb.WatchResponse) -> None:
        message.boot = self._store.boot
        try:
            async with asyncio.timeout(self._pace.stuck):
                await context.write(message)
        except TimeoutError as error:
            reason = f"nothing was read from this watch for {self._pace.stuck} s: watch anew"
            raise Exhausted(reason, 1.0) from error

    def _event(self, entry: IndexEntry[int], reason: RemovalReason | None) -> pb.BlockEvent:
        if reason is None:
            return pb.BlockEvent(block=block_info(self._store, entry))
        gone = pb.BlockInfo(
            name=name_of(entry.name),
            tenant=self._store.tenants.title(entry.name),
            length=entry.size,
        )
        return pb.BlockEvent(removal=REASONS[reason], block=gone)
