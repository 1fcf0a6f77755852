"""Would the plain rule have done better? It is run beside, on names only, and hits are compared.

The names are those a least-recently-used store of as many blocks would have: all of them while
they are few, else those of a sample, each of which stands for as many (Waldspurger et al., "Cache
modeling and optimization using miniature simulations", USENIX ATC 2017).

``lead`` is how many more blocks were found than the plain rule would have found. What is behind by
``LOSS`` of the store copies the plain rule for a while, each time for twice as long; what is ahead
by as much is ``sure``. A lead counts up to one store's worth, so a change is seen in time.
"""

from __future__ import annotations

from kvstore.index.eviction.policy import EvictionNode, LeastRecentlyUsed

NAMES = 4096
"""At most so many names, about 1 MB."""

LOSS = 8
"""An eighth of the store's blocks is a lead: less is what luck does with a few prompts."""

SPELL, LONGEST = 4, 64
"""How long the plain rule is copied, in turnovers of the store: until its contents are the plain
rule's own and some have been used; and at most."""


class ShadowLru:
    """``plain`` says whether to copy the plain rule now, ``sure`` whether it is well beaten."""

    def __init__(self) -> None:
        self._order = LeastRecentlyUsed()
        self._names: dict[bytes, EvictionNode] = {}
        self._mask = 0
        self._until = 0
        self._spell = SPELL
        self._lead = 0
        self.plain = self.sure = False

    def used(self, node: EvictionNode, there: bool, size: int, serial: int) -> None:
        """A block was read, or put because it was not ``there``; the store has room for ``size``.

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
        if self.plain:
            if serial >= self._until:
                self.plain = False
                self._lead = 0
        elif self._lead < -(size // LOSS):
            self.plain = True
            self._until = serial + self._spell * size
            self._spell = min(2 * self._spell, LONGEST)
        self.sure = self._lead >= size // LOSS

    def drop(self, name: bytes) -> None:
        """A block is gone under either rule."""
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
    return int.from_bytes(name[-8:], "little")  # of a digest: any part of it is a draw
