"""A place in the arena that one writer has borrowed for one block."""

from __future__ import annotations

from kvrelay.block.header import HeaderFields, stated_length
from kvrelay.block.verify import verify_payload
from kvrelay.errors import Corrupt
from kvstore.claims import Claim, check_block, check_header, name_of
from kvstore.wire.copying import copy_summed


class WriteSlot:
    """``take`` the block, or fill ``buffer`` and ``check`` it; the store settles it either way.

    Then ``found`` is what its header says, or ``reason`` why it is not what was claimed.
    """

    __slots__ = ("buffer", "claim", "found", "place", "reason", "ticket")

    def __init__(self, ticket: int, claim: Claim, place: int, buffer: memoryview) -> None:
        self.ticket = ticket
        self.claim = claim
        self.place = place
        self.buffer = buffer
        self.found: HeaderFields | None = None
        self.reason: str | None = None

    def take(self, source: memoryview) -> None:
        """Copy the block from memory that somebody may still write to: only the copy counts."""
        start = min(stated_length(source), len(source))
        head, payload = bytes(source[:start]), self.buffer[start:]
        try:
            found = check_header(name_of(self.claim.name), head)
            self.buffer[:start] = head
            verify_payload(found, payload, copy_summed(payload, source[start:]))
        except Corrupt as error:
            self.reason = str(error)
        else:
            self.found = found

    def check(self) -> None:
        """All of it lies in ``buffer``."""
        try:
            self.found = check_block(self.claim, self.buffer)
        except Corrupt as error:
            self.reason = str(error)
