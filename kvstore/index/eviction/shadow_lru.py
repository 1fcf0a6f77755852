"""A shadow LRU: least-recently-used eviction simulated on names, to compare its hits with ours.

The names are those that an LRU store of as many blocks would hold: all of them while they are few,
else a sample, each name of which stands for as many (Waldspurger et al., "Cache modeling and
optimization using miniature simulations", USENIX ATC 2017).

``lead`` is how many more blocks our policy found than LRU would have found. A policy that is behind
by ``LOSS`` of the store follows LRU for a while, each time for twice as long; one that is ahead by
as much is ``sure``. The lead is at most one store's worth, so a change is noticed in time.

The shadow is too weak where a prompt is a large part of the store: the blocks that we had are used
from the last to the first when their lease ends, and one that the shadow lacks can push out the
beginning of its own prompt. With the uses counted when the lease begins, first to last, the lead is
exact; but then a prompt or two decide, and fewer hits remain where agents' prompts are long.
``benchmarks/README.md`` has what LRU is ahead by at worst.
"""

from __future__ import annotations

from kvstore.index.eviction.policy import EvictionNode, LeastRecentlyUsed

NAMES = 4096
"""Names in the simulation at most."""

NAME_BYTES = 400
"""Memory of a name in the simulation, measured."""

LOSS = 8
"""An eighth of the store's blocks decides: a smaller difference can be chance."""

SPELL, LONGEST = 4, 64
"""How long LRU is followed, in turnovers of the store: until the content is that of LRU and some of
it has been used; and at most."""


class ShadowLru:
    """``follow_lru`` says whether to evict as LRU does now, ``sure`` whether LRU is well beaten."""

    def __init__(self) -> None:
        self._order = LeastRecentlyUsed()
        self._names: dict[bytes, EvictionNode] = {}
        self._mask = 0
        self._until = 0
        self._spell = SPELL
        self._lead = 0
        self.follow_lru = False
        self.sure = False

    def __len__(self) -> int:
        return len(self._names)

    def used(self, node: EvictionNode, there: bool, size: int, serial: int) -> None:
        """A block was read, or put because it was not ``there``; the store holds ``size`` blocks.

        ``serial`` counts the uses.
        """
        if _key(node.name) & self._mask:
            return
        weight = self._mask + 1
        if (had := self._names.get(node.name)) is not None:
            self._order.touch(had)
        else:
            self._add(EvictionNode(node.name, node.parent), size // weight)
        if there != (had is not None):
            self._lead = min(self._lead + (weight if there else -weight), size)
        if self.follow_lru:
            if serial >= self._until:
                self.follow_lru = False
                self._lead = 0
        elif self._lead < -(size // LOSS):
            self.follow_lru = True
            self._until = serial + self._spell * size
            self._spell = min(2 * self._spell, LONGEST)
        self.sure = self._lead >= size // LOSS

    def drop(self, name: bytes) -> None:
        """A block was removed under either policy."""
        if (node := self._names.pop(name, None)) is not None:
            self._order.remove(node, self._parent(node))

    def _add(self, node: EvictionNode, most: int) -> None:
        self._names[node.name] = node
        self._order.add(node, self._parent(node))
        while len(self._names) > most and (oldest := self._order.victim()) is not None:
            self.drop(oldest.name)
        if len(self._names) > NAMES:
            self._mask = 2 * self._mask + 1
            for name in [name for name in self._names if _key(name) & self._mask]:
                self.drop(name)

    def _parent(self, node: EvictionNode) -> EvictionNode | None:
        return None if node.parent is None else self._names.get(node.parent)


def _key(name: bytes) -> int:
    return int.from_bytes(name[-8:], "little")  # a digest: every part of it is random
