"""Eviction by expected reuse: the block with the lowest expected hits per second is evicted first.

A block's wide class is how many uses it had lately and whether it is partial; its class is also the
gap of its chain: how long after the prompt before came the last prompt that used it. How soon
blocks of a class are used again, given the time since the last use, is learned (``life_table``);
only the constants below are set, each with its reason. Where LRU would have had more hits
(``shadow_lru``), LRU is followed; until LRU is well beaten, the policy departs from it only where
the difference is clear.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from kvstore.index.eviction.ghosts import GHOST_BYTES, Ghost, GhostList
from kvstore.index.eviction.life_table import GAPS, TUNED, LifeTable, Tuning
from kvstore.index.eviction.policy import EvictionNode, LeastRecentlyUsed
from kvstore.index.eviction.shadow_lru import NAME_BYTES, ShadowLru
from kvstore.limits import RETURNS

HAND_OVER = 5.0
"""Uses within so many seconds are one use: by the worker that put a block and by the worker that
takes over. The "correlated reference period" of O'Neil, O'Neil, Weikum, "LRU-K", SIGMOD 1993."""

LONG = 0.9
"""A use counts half after the age by which this share of all reuse has happened."""

LEVELS = 16
"""Classes by number of uses, two for each doubling: up to 181 uses."""

GHOSTS, SHARE = 1 << 16, 4
"""Evicted blocks remembered: at least ``GHOSTS``, and at least a quarter of the stored ones."""

CLEAR = 1.5
"""A ratio of ranks that a few prompts do not produce by chance."""

CONTINUED = 1.0
"""Seconds in which the rest of a prompt is computed and put after its beginning was found: without
the beginning the rest is useless."""

SAMPLE, POOL = 8, 8
"""Leaves compared to find a victim: random ones, and the worst of those compared before. A block
whose last child was evicted is compared next, so a run is evicted block by block."""


class ExpectedReturns(LeastRecentlyUsed):
    """The policy ``returns``; the cost of an eviction does not depend on the number of blocks."""

    name = RETURNS

    def __init__(self, ghosts: int = GHOSTS, tuning: Tuning = TUNED) -> None:
        super().__init__()
        self._learn = tuning.learn
        self._remembered = ghosts
        self._now = 0.0
        self._half_life = math.inf
        self._table = LifeTable(tuning)
        self._ghosts = GhostList()
        self._shadow = ShadowLru()
        self._leaves: list[EvictionNode] = []  # free nodes without children; each knows its index
        self._pool: dict[EvictionNode, None] = {}
        self._chance = random.Random(0)  # the same requests give the same victims
        self._size = 0
        self._prompts = 0  # since the ranks were computed
        self._peak = self._room = 0  # most blocks since the last refresh, and before it
        self._victim: EvictionNode | None = None  # evicted for room, not expired
        # The block before the one used last, and the gap of the prompt that used it.
        self._run: tuple[bytes | None, int] = (None, 0)

    @property
    def overhead_bytes(self) -> int:
        return GHOST_BYTES * len(self._ghosts) + NAME_BYTES * len(self._shadow)

    def advance(self, now: float) -> None:
        """The time never goes back."""
        if self._now < now < math.inf:
            self._now = now

    def add(self, node: EvictionNode, parent: EvictionNode | None) -> None:
        super().add(node, parent)
        self._size += 1
        self._peak = max(self._peak, self._size)
        self._room = max(self._room, self._size)
        if parent is None:
            self._prompts += 1
        else:
            node.gap = parent.gap
        if (ghost := self._ghosts.take(node.name)) is not None:
            self._table.end(ghost.use_class, ghost.used_at, self._now, used=True)
            node.uses = 1.0 + self._decayed(ghost.uses, ghost.counted_at)
            node.gap = _gap(self._now - ghost.counted_at)
        node.counted_at = self._now
        self._watch(node)
        self._add_leaf(node)
        self._shadow.used(node, False, self._room, self._serial)

    def touch(self, node: EvictionNode) -> None:
        self._unwatch(node)
        super().touch(node)
        self._watch(node)
        self._shadow.used(node, True, self._room, self._serial)

    def cover(self, name: bytes, node: EvictionNode | None) -> None:
        super().cover(name, node)
        if node is not None:
            self._drop_leaf(node)

    def uncover(self, name: bytes, node: EvictionNode | None) -> None:
        super().uncover(name, node)
        if node is not None:
            self._add_leaf(node)

    def hold(self, node: EvictionNode) -> None:
        super().hold(node)
        self._drop_leaf(node)
        node.gap = self._gap_of(node)  # for what is put after it while it is held

    def free(self, node: EvictionNode) -> None:
        self._unwatch(node)
        super().free(node)
        self._watch(node)
        self._add_leaf(node)
        self._shadow.used(node, True, self._room, self._serial)

    def remove(self, node: EvictionNode, parent: EvictionNode | None) -> None:
        super().remove(node, parent)
        self._size -= 1
        self._drop_leaf(node)
        if node is not self._victim:
            self._shadow.drop(node.name)
        self._victim = None
        ghost = Ghost(node.use_class, node.uses, node.used_at, node.counted_at)
        for lost in self._ghosts.put(node.name, ghost, max(self._remembered, self._size // SHARE)):
            self._table.end(lost.use_class, lost.used_at, self._now, used=False)
        if parent is not None and parent.leaf_index >= 0:
            self._pool[parent] = None

    def victim(self) -> EvictionNode | None:
        self._victim = oldest = super().victim()
        if oldest is None or self._shadow.follow_lru or not self._table.ready:
            return oldest
        least = self._least()
        if self._shadow.sure or self._rank(oldest) > CLEAR * self._rank(least):
            self._victim = least
        return self._victim

    def choose(self, nodes: Sequence[EvictionNode]) -> EvictionNode | None:
        if self._shadow.follow_lru or not self._table.ready:
            return super().choose(nodes)
        leaves = (node for node in nodes if self._is_leaf(node))
        return min(leaves, key=lambda node: (self._rank(node), node.used), default=None)

    def _least(self) -> EvictionNode:
        """The compared leaf with the lowest rank."""
        seen = self._pool
        for _ in range(SAMPLE):
            seen[self._leaves[int(self._chance.random() * len(self._leaves))]] = None
        rank, now = self._table.rank, self._now
        worst = sorted(
            (
                node.uses > 1.0 and node.was_read and now - node.used_at <= CONTINUED,
                rank(node.use_class, now - node.used_at),
                node.used,
                node,
            )
            for node in seen
        )
        self._pool = {entry[3]: None for entry in worst[: POOL + 1]}
        return worst[0][3]

    def _rank(self, node: EvictionNode) -> float:
        return self._table.rank(node.use_class, self._now - node.used_at)

    def _unwatch(self, node: EvictionNode) -> None:
        """Learn from a use of the node."""
        now = self._now
        if now - node.counted_at > HAND_OVER:
            # A run is used from its last block on.
            chain, gap = self._run
            if chain != node.name:
                self._prompts += 1
                gap = self._gap_of(node)
            node.gap = gap
            node.uses = 1.0 + self._decayed(node.uses, node.counted_at)
            node.counted_at = now
        self._run = (node.parent, node.gap)
        node.was_read = True
        self._table.end(node.use_class, node.used_at, now, used=True)

    def _gap_of(self, node: EvictionNode) -> int:
        """The gap of a prompt for which this is the last known block."""
        gap = self._now - node.counted_at
        return _gap(gap) if gap > HAND_OVER else node.gap

    def _watch(self, node: EvictionNode) -> None:
        node.used_at = self._now
        node.use_class = _use_class(node)
        self._table.begin(node.use_class, node.used_at)
        if self._prompts >= self._learn:
            self._prompts = 0
            self._table.refresh(self._now)
            self._half_life = self._table.reuse_age(LONG) or math.inf
            self._room = self._peak
            self._peak = self._size

    def _decayed(self, uses: float, since: float) -> float:
        return uses * math.exp2((since - self._now) / self._half_life)

    def _add_leaf(self, node: EvictionNode) -> None:
        if node.leaf_index < 0 and self._is_leaf(node):
            node.leaf_index = len(self._leaves)
            self._leaves.append(node)

    def _drop_leaf(self, node: EvictionNode) -> None:
        if node.leaf_index < 0:
            return
        self._pool.pop(node, None)
        last = self._leaves.pop()
        if last is not node:
            self._leaves[node.leaf_index] = last
            last.leaf_index = node.leaf_index
        node.leaf_index = -1


def _gap(seconds: float) -> int:
    """The class of a gap, by its octave; 0 is for chains that one prompt used."""
    return min(math.frexp(seconds + 1.0)[1], GAPS - 1)


def _use_class(node: EvictionNode) -> int:
    """The class as one number."""
    if node.uses > 1.0:
        level = 1 + min(1 + int(2.0 * math.log2(node.uses)), LEVELS)
    else:
        level = int(node.was_read)
    return (2 * level + node.partial) * GAPS + node.gap
