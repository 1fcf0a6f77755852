"""Which block goes first when the store is full.

A policy knows every block and who follows whom. What a lease holds is no victim until it is free
again, so a victim is found without searching.
"""

from __future__ import annotations

import heapq
from typing import Protocol


class Policy(Protocol):
    """Order among the blocks of the store."""

    def add(self, name: bytes, parent: bytes | None) -> None:
        """A new block, free and just used; ``parent`` is the block it continues, if known."""

    def touch(self, name: bytes) -> None:
        """A block was just used."""

    def hold(self, name: bytes) -> None:
        """A free block is no victim from now on."""

    def free(self, name: bytes) -> None:
        """A held block may be a victim again, and was just used."""

    def remove(self, name: bytes) -> None:
        """A block is gone, free or held."""

    def victim(self) -> bytes | None:
        """The free block to go next, left in place; ``None`` when there is none."""


class _Node:
    __slots__ = ("held", "parent", "used")

    def __init__(self, parent: bytes | None, used: int) -> None:
        self.parent, self.used = parent, used
        self.held = False


class LeastRecentlyUsed:
    """The block not used for the longest time goes first, but none before those that continue it.

    A run whose head is gone is of no use to anybody: lookups count from the head. So a block is a
    victim only while nothing follows it. (Should blocks follow one another in a circle, which true
    names cannot do, any free one goes.)
    """

    def __init__(self) -> None:
        self._nodes: dict[bytes, _Node] = {}
        self._children: dict[bytes, int] = {}  # by parent, there or not
        self._heap: list[tuple[int, bytes]] = []  # free leaves by last use, with stale entries
        self._serial = 0

    def add(self, name: bytes, parent: bytes | None) -> None:
        """As the protocol says."""
        parent = None if parent == name else parent
        self._serial += 1
        self._nodes[name] = _Node(parent, self._serial)
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._offer(name)

    def touch(self, name: bytes) -> None:
        """As the protocol says."""
        self._serial += 1
        self._nodes[name].used = self._serial
        self._offer(name)

    def hold(self, name: bytes) -> None:
        """As the protocol says."""
        self._nodes[name].held = True

    def free(self, name: bytes) -> None:
        """As the protocol says."""
        node = self._nodes[name]
        node.held = False
        self._serial += 1
        node.used = self._serial
        if name not in self._children:
            heapq.heappush(self._heap, (node.used, name))
            self._trim()

    def remove(self, name: bytes) -> None:
        """As the protocol says."""
        parent = self._nodes.pop(name).parent
        if parent is None:
            return
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
        else:
            del self._children[parent]
            self._offer(parent)

    def victim(self) -> bytes | None:
        """As the protocol says."""
        while self._heap:
            used, name = self._heap[0]
            node = self._nodes.get(name)
            if node is not None and node.used == used and self._is_free_leaf(name, node):
                return name
            heapq.heappop(self._heap)
        free = (name for name, node in self._nodes.items() if not node.held)
        return min(free, key=lambda name: self._nodes[name].used, default=None)

    def _is_free_leaf(self, name: bytes, node: _Node) -> bool:
        return not node.held and name not in self._children

    def _offer(self, name: bytes) -> None:
        node = self._nodes.get(name)
        if node is None or not self._is_free_leaf(name, node):
            return
        heapq.heappush(self._heap, (node.used, name))
        self._trim()

    def _trim(self) -> None:
        if len(self._heap) > 2 * len(self._nodes) + 64:
            leaves = ((n.used, k) for k, n in self._nodes.items() if self._is_free_leaf(k, n))
            self._heap = list(leaves)
            heapq.heapify(self._heap)
