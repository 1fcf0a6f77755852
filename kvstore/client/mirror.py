"""A copy of a store's index outside the store, kept up to date by the events of ``Watch``."""

from __future__ import annotations

from kvrelay.errors import Corrupt
from kvrelay.v1 import store_pb2 as pb


class StoreMirror:
    """``blocks`` by tenant and name, as of the event ``sequence`` of ``boot``.

    ``whole`` is false before the first snapshot and in the middle of one.
    """

    def __init__(self) -> None:
        self.boot = b""
        self.sequence = 0
        self.whole = False
        self.blocks: dict[tuple[str, bytes], pb.BlockInfo] = {}

    def apply(self, message: pb.WatchResponse) -> None:
        """Apply one message; ``Corrupt`` if messages between it and the last one are missing."""
        if message.WhichOneof("part") == "page":
            self._page(message)
            return
        count = len(message.events.events)
        if not self.whole or message.boot != self.boot or message.sequence != self.sequence + count:
            raise Corrupt("sequence", f"{count} events up to {message.sequence} do not follow")
        for event in message.events.events:
            key = (event.block.tenant, event.block.name)
            if event.removal:
                self.blocks.pop(key, None)
            else:
                self.blocks[key] = event.block
        self.sequence = message.sequence

    def _page(self, message: pb.WatchResponse) -> None:
        if message.page.first:
            self.boot = message.boot
            self.sequence = message.sequence
            self.blocks = {}
        elif self.whole or (self.boot, self.sequence) != (message.boot, message.sequence):
            raise Corrupt("page", "the pages before it are missing")
        for block in message.page.blocks:
            self.blocks[block.tenant, block.name] = block
        self.whole = message.page.last
