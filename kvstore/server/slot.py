"""A place in the arena that one writer has borrowed for one block."""

from __future__ import annotations

from common.errors import Corrupt
from kvblock.header import Fields, stated_length
from kvstore.book.check import Summed, check_block
from kvstore.records import Claim
from kvstore.wire.copying import copy, copy_summed


class Slot:
    """``take`` the block, or fill ``buffer`` and ``check`` it; the vault settles it either way.

    Then ``found`` is what its header says, or ``reason`` why it is not what was claimed.
    """

    __slots__ = ("buffer", "claim", "found", "place", "reason", "ticket")

    def __init__(self, ticket: int, claim: Claim, place: int, buffer: memoryview) -> None:
        self.ticket, self.claim, self.place, self.buffer = ticket, claim, place, buffer
        self.found: Fields | None = None
        self.reason: str | None = None

    def take(self, source: memoryview) -> None:
        """Copy the block from memory that somebody may still write to: only the copy counts."""
        start = min(stated_length(source), len(source))
        copy(self.buffer[:start], source[:start])
        self.check(Summed(start, copy_summed(self.buffer[start:], source[start:])))

    def check(self, summed: Summed | None = None) -> None:
        """All of it has come. Whoever is to see it does so once it is settled."""
        try:
            self.found = check_block(self.claim, self.buffer, summed=summed)
        except Corrupt as error:
            self.reason = str(error)
