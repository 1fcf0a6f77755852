"""The places of the blocks of one put on a lane: each row is compared with what was reserved."""

from __future__ import annotations

import time
from collections.abc import Generator

from common.errors import Rejected
from kvstore.server.vault import Slot, Vault
from kvstore.wire.frames import Request, Row, rows_of


def places(
    vault: Vault, request: Request, body: bytes
) -> Generator[tuple[Slot | None, Row], None, None]:
    """The place of each row's block, ``None`` if its reservation has ended or never was.

    Close it: a place that was not kept by then is given back.
    """
    rows = rows_of(body, request.count, vault.limits.max_block)
    known = vault.knows(request.serial, request.token)
    prefix = vault.owner(request.serial) or b""
    prolonged = 0.0
    for row in rows:
        if known and time.monotonic() - prolonged > vault.limits.ticket_life / 10:
            prolonged = time.monotonic()
            vault.prolong(request.serial)
        slot = _place(vault, request.serial, row, prefix) if known else None
        try:
            yield slot, row
        finally:
            if slot is not None:
                slot.drop()


def _place(vault: Vault, ticket: int, row: Row, prefix: bytes) -> Slot | None:
    slot = vault.slot(ticket, prefix + row.name)
    if slot is not None and slot.claim.size != row.size:
        slot.drop()
        raise Rejected("rows.size", f"{row.size} is not the {slot.claim.size} that was reserved")
    return slot
