"""``Watch``: a snapshot for a reader that is new or was away for too long, then events.

For each reader one message waits and, during a snapshot, the list of blocks. Events are kept once
for all readers, a bounded number of them. A reader that is too slow is cut off with the reason.
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
MAX_EVENTS = 1000
"""Events in one message."""

REASONS: dict[RemovalReason, pb.Removal.ValueType] = {
    RemovalReason.EVICTED: pb.REMOVAL_EVICTED,
    RemovalReason.EXPIRED: pb.REMOVAL_EXPIRED,
    RemovalReason.CLEARED: pb.REMOVAL_CLEARED,
    RemovalReason.CORRUPT: pb.REMOVAL_CORRUPT,
}


class WatchStream(Protocol):
    """The part of a call's context that is used."""

    async def write(self, message: pb.WatchResponse, /) -> None:
        """Send a message; returns when there is room for the next."""


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """Seconds. Events of one ``interval`` go in one message."""

    interval: float = 0.05
    silence: float = 5.0  # without events, then an empty message follows
    stuck: float = 30.0  # a reader that takes no message for this long is cut off


class WatchServer:
    """Serves at most ``most`` calls at once."""

    def __init__(
        self, store: BlockStore, options: WatchOptions | None = None, most: int = 64
    ) -> None:
        self._store = store
        self._options = options or WatchOptions()
        self._most = most
        self.count = 0

    async def serve(self, request: pb.WatchRequest, context: WatchStream) -> None:
        """Serve until the client leaves; ``Exhausted`` if it is too slow."""
        if self.count == self._most:
            raise Exhausted("too many clients watch this store", retry_after=10.0)
        self.count += 1
        try:
            known = request.boot == self._store.boot
            at = request.sequence if known else None
            if at is None or self._store.events(at, 0) is None:
                at = await self._send_snapshot(context)
            await self._follow(at, context)
        finally:
            self.count -= 1

    async def _send_snapshot(self, context: WatchStream) -> int:
        last, entries = await asyncio.to_thread(self._store.snapshot)
        first = True
        for blocks in info_pages(self._store, iter(entries)):
            page = pb.SnapshotPage(first=first, last=len(blocks) < PAGE, blocks=blocks)
            await self._write(context, pb.WatchResponse(sequence=last, page=page))
            first = False
            if self._store.events(last, 0) is None:  # else the list would be kept for hours
                raise Exhausted(_TOO_SLOW.format(last), 1.0)
        return last

    async def _follow(self, at: int, context: WatchStream) -> None:
        said = 0.0
        while True:
            events = self._store.events(at, MAX_EVENTS)
            if events is None:
                raise Exhausted(_TOO_SLOW.format(at), 1.0)
            now = time.monotonic()
            if events or now - said >= self._options.silence:
                at += len(events)
                said = now
                batch = pb.BlockEvents(events=(self._event(*event) for event in events))
                await self._write(context, pb.WatchResponse(sequence=at, events=batch))
            if len(events) < MAX_EVENTS:
                await asyncio.sleep(self._options.interval)

    async def _write(self, context: WatchStream, message: pb.WatchResponse) -> None:
        message.boot = self._store.boot
        try:
            async with asyncio.timeout(self._options.stuck):
                await context.write(message)
        except TimeoutError as error:
            reason = f"nothing was read from this watch for {self._options.stuck} s: watch anew"
            raise Exhausted(reason, 1.0) from error

    def _event(self, entry: IndexEntry[int], reason: RemovalReason | None) -> pb.BlockEvent:
        if reason is None:
            return pb.BlockEvent(block=block_info(self._store, entry))
        removed = pb.BlockInfo(
            name=name_of(entry.name),
            tenant=self._store.tenants.title(entry.name),
            length=entry.size,
        )
        return pb.BlockEvent(removal=REASONS[reason], block=removed)
