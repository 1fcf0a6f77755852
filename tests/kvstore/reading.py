"""A careful reader: what it takes of what a store hands out, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from kvrelay.block.header import decode
from kvrelay.block.verify import verify_payload
from kvrelay.errors import Corrupt, KvrelayError
from kvstore.base import Block, Store, Want
from tests.kvstore.rig import name_of


def accepted(
    store: Store, blocks: Sequence[Block], timeout: float = 3.0, *failing: type[KvrelayError]
) -> tuple[int, int]:
    """How many of ``blocks`` come and are right, and how many it refuses; ``failing`` ends it."""
    wants = [Want(name_of(b), memoryview(bytearray(b.payload.nbytes))) for b in blocks]
    taken = refused = 0
    with suppress(*failing):
        for got in store.get(wants, timeout):
            if got.header is None:
                continue
            try:
                header = decode(got.header)
                if header != decode(blocks[got.index].header):
                    raise Corrupt("header", "another block")
                verify_payload(header, wants[got.index].buffer, got.summed)
            except Corrupt:
                refused += 1
                continue
            taken += 1
            assert wants[got.index].buffer == blocks[got.index].payload
    return taken, refused
