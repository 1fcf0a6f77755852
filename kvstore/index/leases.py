"""Leases: which blocks are held, and until when. Pure.

A lease holds the entry it was given for, not a later block of the same name.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

from kvstore.claims import prefix_of
from kvstore.index.deadlines import Deadlines
from kvstore.index.entries import IndexEntry

V = TypeVar("V")

LEASE_OVERHEAD = 64
"""The cost of a lease besides its names, counted in names: about as much memory."""


class LeaseTable(Generic[V]):
    """Blocks by lease. The caller ends the leases that are due by ``ends``."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[IndexEntry[V], ...]] = {}
        self.ends: Deadlines[int] = Deadlines()
        self._costs: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, lease: int, blocks: tuple[IndexEntry[V], ...], deadline: float) -> None:
        """Add a lease."""
        self._blocks[lease] = blocks
        self.ends.set(lease, deadline)
        self._count(blocks, 1)

    def end(self, lease: int) -> tuple[IndexEntry[V], ...]:
        """End a lease; returns the blocks it held, none if it has ended before."""
        self.ends.drop(lease)
        blocks = self._blocks.pop(lease, ())
        self._count(blocks, -1)
        return blocks

    def blocks(self, lease: int) -> tuple[IndexEntry[V], ...] | None:
        """The blocks that a lease holds; ``None`` if it has ended."""
        return self._blocks.get(lease)

    def extend(self, lease: int, deadline: float) -> bool:
        """Move the end of a lease; false if it has ended."""
        if lease not in self._blocks:
            return False
        self.ends.set(lease, deadline)
        return True

    def revoke(self, block: IndexEntry[V]) -> None:
        """Take a block out of every lease. Rare: searches all leases."""
        for lease, blocks in self._blocks.items():
            if block in blocks:
                self._blocks[lease] = left = tuple(other for other in blocks if other is not block)
                self._count(blocks, -1)
                self._count(left, 1)

    def cost(self, owner: bytes) -> int:
        """The cost of all leases of a tenant, in names; ``owner`` is the tenant's prefix."""
        return self._costs[owner]

    @property
    def overhead_bytes(self) -> int:
        """The memory of all leases: a reference for each name."""
        return 8 * self._costs.total()

    def total_blocks(self) -> int:
        """The number of blocks in all leases together."""
        return sum(map(len, self._blocks.values()))

    def _count(self, blocks: tuple[IndexEntry[V], ...], times: int) -> None:
        if blocks:
            self._costs[prefix_of(blocks[0].name)] += times * (LEASE_OVERHEAD + len(blocks))
