"""Eviction policies: the interface, and least recently used.

A policy knows every block and which block each continues. A leased block is no candidate until its
last lease ends, so a victim is found without a search.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol

from kvstore.limits import LRU

SLACK = 1024
"""Stale heap entries that are always tolerated."""


class EvictionNode:
    """A policy's record of one block; ``parent`` is the name of the block it continues, if any.

    Index entries are nodes, so that a block is one object and not three.
    """

    __slots__ = (
        "counted_at",
        "gap",
        "held",
        "late_until",
        "leaf_index",
        "name",
        "parent",
        "partial",
        "use_class",
        "used",
        "used_at",
        "uses",
        "was_read",
    )

    def __init__(self, name: bytes, parent: bytes | None, partial: bool = False) -> None:
        self.name = name
        self.parent = None if parent == name else parent
        self.used = 0
        self.held = False
        self.partial = partial
        self.late_until = 0.0  # see ``hints``
        # The rest is for ``expected_returns``.
        self.used_at = 0.0
        self.counted_at = 0.0
        self.uses = 1.0
        self.use_class = 0
        self.leaf_index = -1
        self.was_read = False
        self.gap = 0


class EvictionPolicy(Protocol):
    """Decides which block is evicted next."""

    @property
    def name(self) -> str:
        """The policy's name in ``--eviction``."""

    @property
    def overhead_bytes(self) -> int:
        """Memory that the policy takes besides the nodes, as measured."""

    def advance(self, now: float) -> None:
        """The time is ``now``, in seconds, until the next call."""

    def add(self, node: EvictionNode, parent: EvictionNode | None) -> None:
        """A new block, free and just used; ``parent`` is the block it continues, if stored."""

    def touch(self, node: EvictionNode) -> None:
        """A block was used now."""

    def cover(self, name: bytes, node: EvictionNode | None) -> None:
        """A child of block ``name`` is being written; ``node`` is that block, if stored.

        The block is no candidate until ``uncover``: without it the child would be useless.
        """

    def uncover(self, name: bytes, node: EvictionNode | None) -> None:
        """The write of a child has ended."""

    def hold(self, node: EvictionNode) -> None:
        """A free block is leased: it is no candidate from now on."""

    def free(self, node: EvictionNode) -> None:
        """A leased block is free again, and was used now."""

    def remove(self, node: EvictionNode, parent: EvictionNode | None) -> None:
        """A block was removed, free or leased; ``parent`` is the one it continued, if stored."""

    def victim(self) -> EvictionNode | None:
        """The free block to evict next, not yet removed; ``None`` if there is no candidate."""

    def choose(self, nodes: Sequence[EvictionNode]) -> EvictionNode | None:
        """The candidate among ``nodes`` to evict first; ``None`` if none of them is one."""


class LeastRecentlyUsed:
    """Evicts the block that was not used for the longest time, but none before its children.

    A run without its head is useless, because lookups count from the head. So only a block without
    children, stored or being written, is a candidate. Names are hashes of their parents, so there
    is no cycle.
    """

    name = LRU

    def __init__(self) -> None:
        self._children: dict[bytes, int] = {}  # by parent, stored or not
        self._heap: list[
            tuple[int, EvictionNode]
        ] = []  # free leaves by last use, and stale entries
        self._serial = 0
        self._limit = SLACK

    @property
    def overhead_bytes(self) -> int:
        return 0

    def advance(self, now: float) -> None:
        """Unused: only the order of uses counts."""

    def add(self, node: EvictionNode, parent: EvictionNode | None) -> None:
        if node.parent is not None:
            self.cover(node.parent, parent)
        self._stamp(node)

    def touch(self, node: EvictionNode) -> None:
        self._stamp(node)

    def cover(self, name: bytes, node: EvictionNode | None) -> None:
        self._children[name] = self._children.get(name, 0) + 1

    def uncover(self, name: bytes, node: EvictionNode | None) -> None:
        left = self._children[name] - 1
        if left:
            self._children[name] = left
            return
        del self._children[name]
        if node is not None:
            self._offer(node)

    def hold(self, node: EvictionNode) -> None:
        node.held = True

    def free(self, node: EvictionNode) -> None:
        node.held = False
        self._stamp(node)

    def remove(self, node: EvictionNode, parent: EvictionNode | None) -> None:
        node.held = True  # makes its heap entries stale
        if node.parent is not None:
            self.uncover(node.parent, parent)

    def victim(self) -> EvictionNode | None:
        while self._heap:
            if self._is_current(self._heap[0]):
                return self._heap[0][1]
            heapq.heappop(self._heap)
        return None

    def choose(self, nodes: Sequence[EvictionNode]) -> EvictionNode | None:
        leaves = (node for node in nodes if self._is_leaf(node))
        return min(leaves, key=lambda node: node.used, default=None)

    def _stamp(self, node: EvictionNode) -> None:
        self._serial += 1
        node.used = self._serial
        self._offer(node)

    def _is_current(self, entry: tuple[int, EvictionNode]) -> bool:
        used, node = entry
        return node.used == used and self._is_leaf(node)

    def _is_leaf(self, node: EvictionNode) -> bool:
        return not node.held and node.name not in self._children

    def _offer(self, node: EvictionNode) -> None:
        if self._is_leaf(node):
            heapq.heappush(self._heap, (node.used, node))
            if len(self._heap) > self._limit:
                self._heap = [entry for entry in self._heap if self._is_current(entry)]
                heapq.heapify(self._heap)
                self._limit = 2 * len(self._heap) + SLACK
