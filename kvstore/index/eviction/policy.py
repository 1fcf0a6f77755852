"""Which block goes first when the store is full.

A policy knows every block and who follows whom. What a lease holds is no victim until it is free
again, so a victim is found without searching.
"""

from __future__ import annotations

import heapq
from typing import Protocol

from kvstore.limits import LRU

SLACK = 1024
"""Stale entries that are always allowed for."""


class EvictionNode:
    """What a policy knows of one block; ``parent`` is the name of the block it continues, if any.

    The store's own records are nodes, so that a block is one object and not three.
    """

    __slots__ = (
        "at",
        "continues",
        "counted_at",
        "held",
        "kind",
        "name",
        "parent",
        "partial",
        "place",
        "read",
        "used",
        "uses",
    )

    def __init__(self, name: bytes, parent: bytes | None, partial: bool = False) -> None:
        self.name = name
        self.parent = None if parent == name else parent
        self.used = 0
        self.held = False
        self.partial = partial
        # The rest is for policies that want to know more, see ``returns.py``.
        self.at = self.counted_at = 0.0
        self.uses = 1.0
        self.kind = 0
        self.place = -1
        self.read = self.continues = False


class EvictionPolicy(Protocol):
    """Order among the blocks of the store."""

    @property
    def name(self) -> str:
        """What it is called."""

    def advance(self, now: float) -> None:
        """It is ``now``, in seconds, until the next call of this."""

    def add(self, node: EvictionNode, parent: EvictionNode | None) -> None:
        """A new block, free and just used; ``parent`` is the one it continues, if that is there."""

    def touch(self, node: EvictionNode) -> None:
        """A block was just used."""

    def hold(self, node: EvictionNode) -> None:
        """A free block is no victim from now on."""

    def free(self, node: EvictionNode) -> None:
        """A held block may be a victim again, and was just used."""

    def remove(self, node: EvictionNode, parent: EvictionNode | None) -> None:
        """A block is gone, free or held; ``parent`` is the one it continued, if that is there."""

    def victim(self) -> EvictionNode | None:
        """The free block to go next, left in place; ``None`` when the policy knows of none."""


class LeastRecentlyUsed:
    """The block not used for the longest time goes first, but none before those that continue it.

    A run whose head is gone is of no use to anybody: lookups count from the head. So a block is a
    victim only while nothing follows it, which true names cannot do in a circle.
    """

    name = LRU

    def __init__(self) -> None:
        self._children: dict[bytes, int] = {}  # by parent, there or not
        self._heap: list[
            tuple[int, EvictionNode]
        ] = []  # free leaves by last use, and stale entries
        self._serial = 0
        self._limit = SLACK

    def advance(self, now: float) -> None:
        """As the protocol says. The order of uses is all that counts here."""

    def add(self, node: EvictionNode, parent: EvictionNode | None) -> None:
        """As the protocol says."""
        if node.parent is not None:
            self._children[node.parent] = self._children.get(node.parent, 0) + 1
        self._stamp(node)

    def touch(self, node: EvictionNode) -> None:
        """As the protocol says."""
        self._stamp(node)

    def hold(self, node: EvictionNode) -> None:
        """As the protocol says."""
        node.held = True

    def free(self, node: EvictionNode) -> None:
        """As the protocol says."""
        node.held = False
        self._stamp(node)

    def remove(self, node: EvictionNode, parent: EvictionNode | None) -> None:
        """As the protocol says."""
        node.held = True  # no entry of it stands any more
        if node.parent is None:
            return
        left = self._children[node.parent] - 1
        if left:
            self._children[node.parent] = left
            return
        del self._children[node.parent]
        if parent is not None:
            self._offer(parent)

    def victim(self) -> EvictionNode | None:
        """As the protocol says."""
        while self._heap:
            if self._stands(self._heap[0]):
                return self._heap[0][1]
            heapq.heappop(self._heap)
        return None

    def _stamp(self, node: EvictionNode) -> None:
        self._serial += 1
        node.used = self._serial
        self._offer(node)

    def _stands(self, entry: tuple[int, EvictionNode]) -> bool:
        used, node = entry
        return node.used == used and self._is_leaf(node)

    def _is_leaf(self, node: EvictionNode) -> bool:
        return not node.held and node.name not in self._children

    def _offer(self, node: EvictionNode) -> None:
        if self._is_leaf(node):
            heapq.heappush(self._heap, (node.used, node))
            if len(self._heap) > self._limit:
                self._heap = [entry for entry in self._heap if self._stands(entry)]
                heapq.heapify(self._heap)
                self._limit = 2 * len(self._heap) + SLACK
