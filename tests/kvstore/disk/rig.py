"""A store with a disk in this process, without gRPC: as quick as its files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstore import Block, PutStatus
from kvstore.claims import Claim
from kvstore.disk.tier import DiskOptions, DiskTier
from kvstore.limits import StoreLimits
from kvstore.server.block_store import BlockStore
from kvstore.stats import DiskStats
from tests.kvstore.rig import name_of

SLOW = 60.0


def until(condition: Callable[[], bool]) -> None:
    """Waits for something to hold."""
    deadline = time.monotonic() + SLOW
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def files(path: Path) -> list[Path]:
    """The segments in a directory."""
    return sorted(path.glob("segment-*"))


def size_of(path: Path) -> int:
    """The bytes of all of them; one that the store deletes meanwhile has none."""
    total = 0
    for file in files(path):
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


class Inside:
    """Puts and gets whole blocks."""

    def __init__(self, block_store: BlockStore, tier: DiskTier) -> None:
        self.block_store = block_store
        self.tier = tier

    @property
    def disk(self) -> DiskStats:
        """Its figures."""
        stats = self.block_store.stats().disk
        assert stats is not None
        return stats

    def put(self, block: Block) -> PutStatus:
        """As a writer does."""
        grant = self.block_store.reserve([Claim(name_of(block), block.size, partial=False)])
        if grant.ticket is None:
            assert grant.verdicts == (PutStatus.EXISTED,)
            return PutStatus.EXISTED
        (slot,) = self.block_store.slots(grant.ticket, [name_of(block)])
        assert slot is not None
        slot.copy_from(memoryview(block.header + bytes(block.payload)))
        return self.block_store.settle([slot])[0].status

    def fill(self, *blocks: Block) -> None:
        """So that each is on disk before memory is short."""
        for block in blocks:
            assert self.put(block) is PutStatus.STORED
            self.finish_write()

    def finish_write(self) -> None:
        """Returns when all is on disk."""
        until(lambda: self.disk.unsaved == 0)

    def get(self, block: Block) -> bytes | None:
        """As a reader does."""
        name, disk_index = name_of(block), self.block_store.disk_index
        assert disk_index is not None
        if disk_index.load([name]):
            disk_index.wait_for([name], SLOW)
        found = self.block_store.locate([name], SLOW)
        if found.lease is None or found.blocks[0] is None:
            return None
        size, place = found.blocks[0]
        data = bytes(self.block_store.arena.view(place, size))
        self.block_store.release([found.lease.id])
        return data

    def has(self, *blocks: Block) -> list[bool]:
        """Whether they are there, in memory or below."""
        sizes = self.block_store.survey([name_of(block) for block in blocks], 0.0).sizes
        return [size is not None for size in sizes]

    def right(self, *blocks: Block) -> list[bool]:
        """Whether they come, byte for byte; wrong bytes fail at once."""
        came = [self.get(block) for block in blocks]
        for data, block in zip(came, blocks, strict=True):
            assert data is None or data == block.header + bytes(block.payload)
        return [data is not None for data in came]


@contextmanager
def inside(
    path: Path, budget: int = 1 << 20, disk_budget: int = 64 << 20, restore: bool = False
) -> Iterator[Inside]:
    """Opened, restored, and closed as a store is that gets SIGTERM."""
    block_store = BlockStore(StoreLimits(budget, disk_budget=disk_budget))
    assert block_store.disk_index is not None
    tier = DiskTier(
        DiskOptions(str(path), disk_budget, restore), block_store.disk_index, block_store.arena
    )
    tier.start()
    try:
        assert tier.wait_restored(SLOW)
        yield Inside(block_store, tier)
        tier.flush(SLOW)
    finally:
        tier.close()
