"""The blocks of one put on a lane, from wherever they come into their places, a group at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvrelay.errors import Rejected
from kvstore.base import Outcome
from kvstore.server.block_store import BlockStore
from kvstore.server.slot import WriteSlot
from kvstore.wire.buffers import size_batches
from kvstore.wire.frames import BlockRow

GROUP_BYTES, GROUP_BLOCKS = 4 << 20, 256
"""Borrowed and made visible together: the bookkeeping of one costs nearly as much as of many."""

ReceiveRow = Callable[[WriteSlot | None, BlockRow], None]
"""Has a row's block come into its slot and be checked there; without a slot it is let pass."""


def place_rows(
    store: BlockStore,
    ticket: int,
    prefix: bytes | None,
    rows: Sequence[BlockRow],
    bring: ReceiveRow,
) -> list[Outcome]:
    """An outcome for each row. ``prefix`` is that of the ticket's owner, ``None`` if none is known.

    Whatever happens, what has come by then is visible and every other place given back.
    """
    outcomes: list[Outcome] = []
    known, prolonged = prefix is not None, 0.0
    for group in size_batches(rows, GROUP_BYTES, GROUP_BLOCKS):
        names = [row.name for row in group] if not prefix else [prefix + row.name for row in group]
        slots = [None] * len(group) if prefix is None else store.slots(ticket, names)
        try:
            for slot, row in zip(slots, group, strict=True):
                if slot is not None and slot.claim.size != row.size:
                    reserved = f"the {slot.claim.size} that was reserved"
                    raise Rejected("rows.size", f"{row.size} is not {reserved}")
                if known and time.monotonic() - prolonged > store.limits.ticket_life / 10:
                    prolonged = time.monotonic()
                    store.prolong(ticket)
                bring(slot, row)
        finally:
            outcomes += store.settle(slots)
    return outcomes
