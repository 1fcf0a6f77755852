"""A place in the arena that one writer has borrowed for one block."""

from __future__ import annotations

from kvrelay.block.header import HeaderFields, stated_length
from kvrelay.block.verify import verify_payload
from kvrelay.errors import Corrupt
from kvstore.claims import Claim, check_block, check_header, name_of
from kvstore.wire.copying import copy_summed


class WriteSlot:
    """``copy_from`` memory, or fill ``buffer`` and ``check``; then the block store settles it.

    ``header`` is then the block's header, or ``reason`` says why the block is not the one claimed.
    """

    __slots__ = ("buffer", "claim", "header", "place", "reason", "ticket")

    def __init__(self, ticket: int, claim: Claim, place: int, buffer: memoryview) -> None:
        self.ticket = ticket
        self.claim = claim
        self.place = place
        self.buffer = buffer
        self.header: HeaderFields | None = None
        self.reason: str | None = None

    def copy_from(self, source: memoryview) -> None:
        """Copy the block from memory that its writer can still change; the copy is checked."""
        start = min(stated_length(source), len(source))
        head, payload = bytes(source[:start]), self.buffer[start:]
        try:
            header = check_header(name_of(self.claim.name), head)
            self.buffer[:start] = head
            summed = copy_summed(payload, source[start:], header.heads)
            verify_payload(header, payload, summed)
        except Corrupt as error:
            self.reason = str(error)
        else:
            self.header = header

    def check(self) -> None:
        """Verify the whole block in ``buffer``."""
        try:
            self.header = check_block(self.claim, self.buffer)
        except Corrupt as error:
            self.reason = str(error)
