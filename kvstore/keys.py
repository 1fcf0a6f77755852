"""What the catalog knows a block by: its name, and in front of it what says whose it is."""

from __future__ import annotations

from kvrelay.block.name import NAME_BYTES


def name_of(key: bytes) -> bytes:
    """The block's name."""
    return key[-NAME_BYTES:]


def prefix_of(key: bytes) -> bytes:
    """The tenant's part; empty for the one without a name."""
    return key[:-NAME_BYTES]
