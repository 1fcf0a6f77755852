"""Eviction by what is known of how blocks come back: the one that promises least goes first.

A block's class is how often it was used, of late; whether it continues a conversation that was
there before; and whether it is partial. How soon blocks of a class are used again, given for how
long they have not been, is learned (``lifetable.py``), and so is everything but what stands here
with its reason. Where least-recently-used would have done better (``duel.py``), it is done;
until it is well beaten, only what is clear goes another way.
"""

from __future__ import annotations

import math
import random

from kvstore.index.eviction.ghosts import Ghost, GhostList
from kvstore.index.eviction.life_table import LifeTable
from kvstore.index.eviction.policy import EvictionNode, LeastRecentlyUsed
from kvstore.index.eviction.shadow_lru import ShadowLru
from kvstore.limits import RETURNS

HAND_OVER = 5.0
"""Seconds in which uses are one use: by the worker that put a block, and by the one it is handed
to. The "correlated reference period" of O'Neil, O'Neil, Weikum, "LRU-K", SIGMOD 1993."""

LONG = 0.9
"""A use counts half after the time in which so much of all reuse comes: whoever has not come back
by then seldom does."""

LEVELS = 16
"""Classes by number of uses, two for each doubling: up to 181 of them."""

GHOSTS, SHARE = 1 << 16, 4
"""Evicted blocks remembered: so many, or a quarter of those that are there when that is more."""

LEARN, TURN = 2000, 4
"""Ranks are learned anew each so many uses, or each quarter of a turnover when that is more."""

CLEAR = 1.5
"""A difference of ranks that is more than what a few prompts make of equal ones."""

CONTINUED = 1.0
"""Seconds in which a prompt whose beginning was found is computed and put: without the beginning
the rest is of no use."""

SAMPLE, POOL = 8, 8
"""Leaves looked at for a victim: new ones, and the worst of those seen before. What an eviction
uncovers is looked at next, so a run goes block by block."""


class ExpectedReturns(LeastRecentlyUsed):
    """The policy ``returns``; an eviction costs the same whatever the number of blocks."""

    name = RETURNS

    def __init__(self, ghosts: int = GHOSTS) -> None:
        super().__init__()
        self._remembered = ghosts
        self._now = 0.0
        self._half_life = math.inf
        self._table = LifeTable()
        self._ghosts = GhostList()
        self._duel = ShadowLru()
        self._leaves: list[EvictionNode] = []  # free, and nothing follows; each knows its place
        self._pool: dict[EvictionNode, None] = {}
        self._chance = random.Random(0)  # the same requests, the same victims
        self._size = self._learned = 0
        self._peak = self._room = 0  # most blocks since the last learning, and of the one before
        self._going: EvictionNode | None = None  # what goes for room, not because its time is over

    def advance(self, now: float) -> None:
        """As the protocol says."""
        self._now = now

    def add(self, node: EvictionNode, parent: EvictionNode | None) -> None:
        """As the protocol says."""
        super().add(node, parent)
        self._size += 1
        self._peak = max(self._peak, self._size)
        self._room = max(self._room, self._size)
        node.continues = _continues(parent)
        if (ghost := self._ghosts.take(node.name)) is not None:
            self._table.end(ghost.kind, ghost.used_at, self._now, used=True)
            node.uses = 1.0 + self._worth(ghost.uses, ghost.counted_at)
        if parent is not None:
            self._cover(parent)
        node.counted_at = self._now
        self._watch(node)
        self._uncover(node)
        self._duel.used(node, False, self._room, self._serial)

    def touch(self, node: EvictionNode) -> None:
        """As the protocol says."""
        self._unwatch(node)
        super().touch(node)
        self._watch(node)
        self._duel.used(node, True, self._room, self._serial)

    def hold(self, node: EvictionNode) -> None:
        """As the protocol says."""
        super().hold(node)
        self._cover(node)

    def free(self, node: EvictionNode) -> None:
        """As the protocol says."""
        self._unwatch(node)
        super().free(node)
        self._watch(node)
        self._uncover(node)
        self._duel.used(node, True, self._room, self._serial)

    def remove(self, node: EvictionNode, parent: EvictionNode | None) -> None:
        """As the protocol says."""
        super().remove(node, parent)
        self._size -= 1
        self._cover(node)
        if node is not self._going:
            self._duel.drop(node.name)
        self._going = None
        ghost = Ghost(node.kind, node.uses, node.at, node.counted_at)
        for lost in self._ghosts.put(node.name, ghost, max(self._remembered, self._size // SHARE)):
            self._table.end(lost.kind, lost.used_at, self._now, used=False)
        if parent is not None:
            self._uncover(parent)
            if parent.place >= 0:
                self._pool[parent] = None

    def victim(self) -> EvictionNode | None:
        """As the protocol says."""
        self._going = oldest = super().victim()
        if oldest is None or self._duel.plain or not self._table.ready:
            return oldest
        least = self._least()
        if self._duel.sure or self._rank(oldest) > CLEAR * self._rank(least):
            self._going = least
        return self._going

    def _least(self) -> EvictionNode:
        """Of the leaves looked at the one that promises least."""
        seen = {node: None for node in self._pool if node.place >= 0}
        for _ in range(SAMPLE):
            seen[self._leaves[int(self._chance.random() * len(self._leaves))]] = None
        rank, now = self._table.rank, self._now
        worst = sorted(
            (
                node.uses > 1.0 and node.read and now - node.at <= CONTINUED,
                rank(node.kind, now - node.at),
                node.used,
                node,
            )
            for node in seen
        )
        self._pool = {entry[3]: None for entry in worst[: POOL + 1]}
        return worst[0][3]

    def _rank(self, node: EvictionNode) -> float:
        return self._table.rank(node.kind, self._now - node.at)

    def _unwatch(self, node: EvictionNode) -> None:
        """It is used: what is learned from that."""
        now = self._now
        if now - node.counted_at > HAND_OVER:
            node.uses = 1.0 + self._worth(node.uses, node.counted_at)
            node.counted_at = now
        node.read = True
        self._table.end(node.kind, node.at, now, used=True)

    def _watch(self, node: EvictionNode) -> None:
        node.at = self._now
        node.kind = _kind(node)
        self._table.begin(node.kind, node.at)
        if self._serial >= self._learned:
            self._learned = self._serial + max(LEARN, self._size // TURN)
            self._table.refresh(self._now)
            self._half_life = self._table.long(LONG) or math.inf
            self._room = self._peak
            self._peak = self._size

    def _worth(self, often: float, since: float) -> float:
        return often * math.exp2((since - self._now) / self._half_life)

    def _uncover(self, node: EvictionNode) -> None:
        if node.place < 0 and self._is_leaf(node):
            node.place = len(self._leaves)
            self._leaves.append(node)

    def _cover(self, node: EvictionNode) -> None:
        if node.place < 0:
            return
        last = self._leaves.pop()
        if last is not node:
            self._leaves[node.place] = last
            last.place = node.place
        node.place = -1


def _continues(parent: EvictionNode | None) -> bool:
    """Whether a new block goes on from more than a beginning that all may share."""
    if parent is None:
        return False
    new = not parent.read and parent.uses == 1.0
    return parent.continues if new else parent.parent is not None


def _kind(node: EvictionNode) -> int:
    """The class, as one number. What has come back tells more than what it continues."""
    if node.uses > 1.0:
        return 4 * min(1 + int(2.0 * math.log2(node.uses)), LEVELS) + node.partial
    return (
        2 * node.continues + node.partial if node.read else -1 - 2 * node.continues - node.partial
    )
