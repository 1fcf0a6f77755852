"""Who may rely on which blocks, and until when. Pure.

A lease holds the very block it was given for, not whatever is called so later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

from kvstore.claims import prefix_of
from kvstore.index.deadlines import Deadlines
from kvstore.index.entries import IndexEntry

V = TypeVar("V")

LEASE_OVERHEAD = 64
"""What a lease costs beside its names: about as much memory."""


class LeaseTable(Generic[V]):
    """Blocks by lease; each ends by itself at its deadline."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[IndexEntry[V], ...]] = {}
        self._ends: Deadlines[int] = Deadlines()
        self._load: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._blocks)

    def give(self, lease: int, blocks: tuple[IndexEntry[V], ...], deadline: float) -> None:
        """A new one."""
        self._blocks[lease] = blocks
        self._ends.set(lease, deadline)
        self._count(blocks, 1)

    def end(self, lease: int) -> tuple[IndexEntry[V], ...]:
        """What it held; nothing if it has ended already."""
        self._ends.drop(lease)
        blocks = self._blocks.pop(lease, ())
        self._count(blocks, -1)
        return blocks

    def blocks(self, lease: int) -> tuple[IndexEntry[V], ...] | None:
        """What it holds; ``None`` once it has ended."""
        return self._blocks.get(lease)

    def extend(self, lease: int, deadline: float) -> bool:
        """Move its end; false when it has ended already."""
        if lease not in self._blocks:
            return False
        self._ends.set(lease, deadline)
        return True

    def revoke(self, block: IndexEntry[V]) -> None:
        """No lease holds it any more. Rare: all of them are looked through."""
        for lease, blocks in self._blocks.items():
            if block in blocks:
                self._blocks[lease] = left = tuple(one for one in blocks if one is not block)
                self._count(blocks, -1)
                self._count(left, 1)

    def load(self, owner: bytes) -> int:
        """What all leases of a tenant cost, in names; ``owner`` is its part of their keys."""
        return self._load[owner]

    def held(self) -> int:
        """The sum of all lengths."""
        return sum(map(len, self._blocks.values()))

    def deadlines(self) -> int:
        """As many as there are leases, unless there is a bug."""
        return len(self._ends)

    def nothing_due(self, now: float) -> bool:
        """Whether certainly none is due."""
        return self._ends.nothing_due(now)

    def due(self, now: float) -> Iterator[int]:
        """Those whose time is over; they must be ended."""
        return self._ends.due(now)

    def _count(self, blocks: tuple[IndexEntry[V], ...], times: int) -> None:
        if blocks:
            self._load[prefix_of(blocks[0].name)] += times * (LEASE_OVERHEAD + len(blocks))
