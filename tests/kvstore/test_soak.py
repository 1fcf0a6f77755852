"""Many at once, for a while, at the limit of the budget: nothing is lost and nothing is kept."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from kvstore import PutStatus
from kvstore.claims import Claim
from kvstore.limits import StoreLimits
from kvstore.server.block_store import BlockStore
from tests.kvstore.rig import make, name_of
from tests.kvstore.soak import at_once, disk_flags, soak

SECONDS = 3.0


def test_readers_and_writers_on_every_way_lose_nothing_and_keep_nothing() -> None:
    soak(SECONDS).check()


@pytest.mark.slow
def test_so_do_they_with_a_disk_below(tmp_path: Path) -> None:
    soak(10.0, flags=disk_flags(str(tmp_path))).check()


def test_every_place_of_the_arena_has_one_owner_and_comes_back() -> None:
    block_store = BlockStore(StoreLimits(3 << 20, ticket_life=0.05))
    blocks = [make(size) for size in (100, 900, 9_000, 90_000, 700_000) for _ in range(10)]

    def write(source: random.Random) -> None:
        some = source.sample(blocks, 4)
        grant = block_store.reserve(
            [Claim(name_of(b), b.size, source.random() < 0.2) for b in some]
        )
        for block, verdict in zip(some, grant.verdicts, strict=True):
            if verdict is not PutStatus.RESERVED or grant.ticket is None or source.random() < 0.1:
                continue
            (slot,) = block_store.slots(grant.ticket, [name_of(block)])
            if slot is None:
                continue  # the ticket ran out meanwhile
            if source.random() < 0.1:
                time.sleep(0.06)  # longer than the ticket lives
            if source.random() < 0.9:
                slot.copy_from(memoryview(block.header + bytes(block.payload)))
            assert block_store.settle([slot])[0].status in (PutStatus.STORED, PutStatus.EXPIRED)
        if grant.ticket is not None and source.random() < 0.8:
            block_store.abandon(grant.ticket)

    def read(source: random.Random) -> None:
        some = source.sample(blocks, 6)
        found = block_store.locate([name_of(b) for b in some], 10.0)
        for block, place in zip(some, found.blocks, strict=True):
            if place is not None:
                assert place[0] == block.size
                assert (
                    bytes(block_store.arena.view(place[1], place[0])[-100:]) == block.payload[-100:]
                )
        if found.lease is not None:
            block_store.release([found.lease.id])

    at_once(
        SECONDS,
        None,
        [write] * 4 + [read] * 4,
        lambda: block_store.stats().counters.stored > 100,
    )
    assert block_store.stats().counters.stored > 100
    time.sleep(0.06)  # the last tickets end
    block_store.clear()
    stats = block_store.stats()
    assert (stats.entries, stats.bytes, stats.leases, stats.reservations) == (0, 0, 0, 0)
    slots = block_store.arena.slots
    assert (slots.used, slots.free_runs, slots.longest) == (0, 1, slots.capacity)
