"""Eviction by what is known of how blocks come back: the one that promises least goes first.

A block's class is how often it was used, of late; whether it continues a conversation that was
there before; and whether it is partial. How soon blocks of a class are used again, given for how
long they have not been, is learned (``lifetable.py``), and so is everything but what stands here
with its reason. Where least-recently-used would have done better (``duel.py``), it is done.
"""

from __future__ import annotations

import math
import random

from kvstore.book.duel import Duel
from kvstore.book.ghosts import Ghost, Ghosts
from kvstore.book.lifetable import LifeTable
from kvstore.book.policy import LeastRecentlyUsed, Node

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

SAMPLE, POOL = 16, 32
"""Leaves looked at for a victim: new ones, and the worst of those seen before. What an eviction
uncovers is looked at next, so a run goes block by block."""


class ExpectedReturns(LeastRecentlyUsed):
    """The policy ``returns``; an eviction costs the same whatever the number of blocks."""

    name = "returns"

    def __init__(self, ghosts: int = GHOSTS) -> None:
        super().__init__()
        self._remembered = ghosts
        self._now, self._half_life = 0.0, math.inf
        self._table, self._ghosts, self._duel = LifeTable(), Ghosts(), Duel()
        self._leaves: list[Node] = []  # free, and nothing follows; each knows its place
        self._pool: dict[Node, None] = {}
        self._chance = random.Random(0)  # the same requests, the same victims
        self._size = self._learned = 0
        self._full = False

    def advance(self, now: float) -> None:
        """As the protocol says."""
        self._now = now

    def add(self, node: Node, parent: Node | None) -> None:
        """As the protocol says."""
        super().add(node, parent)
        self._size += 1
        node.continues = _continues(parent)
        if (ghost := self._ghosts.take(node.name)) is not None:
            self._asked(ghost.used, there=False)
            self._forget(ghost, used=True)
            node.often = 1.0 + self._worth(ghost.often, ghost.counted)
        if parent is not None:
            self._cover(parent)
        node.counted = self._now
        self._watch(node)
        self._uncover(node)

    def touch(self, node: Node) -> None:
        """As the protocol says."""
        self._unwatch(node)
        super().touch(node)
        self._watch(node)

    def hold(self, node: Node) -> None:
        """As the protocol says."""
        super().hold(node)
        self._cover(node)

    def free(self, node: Node) -> None:
        """As the protocol says."""
        self._unwatch(node)
        super().free(node)
        self._watch(node)
        self._uncover(node)

    def remove(self, node: Node, parent: Node | None) -> None:
        """As the protocol says."""
        super().remove(node, parent)
        self._size -= 1
        self._cover(node)
        ghost = Ghost(node.kind, node.often, node.at, node.counted, node.used)
        for lost in self._ghosts.put(node.name, ghost, max(self._remembered, self._size // SHARE)):
            self._forget(lost, used=False)
        if parent is not None:
            self._uncover(parent)
            if parent.place >= 0:
                self._pool[parent] = None

    def victim(self) -> Node | None:
        """As the protocol says."""
        self._full = True
        if self._duel.plain or not self._table.ready or not self._leaves:
            return super().victim()
        seen = {node: None for node in self._pool if node.place >= 0}
        for _ in range(SAMPLE):
            seen[self._leaves[int(self._chance.random() * len(self._leaves))]] = None
        rank, now = self._table.rank, self._now
        worst = sorted(seen, key=lambda node: (rank(node.kind, now - node.at), node.used))
        self._pool = dict.fromkeys(worst[: POOL + 1])
        return worst[0]

    def _unwatch(self, node: Node) -> None:
        """It is used: what is learned from that."""
        now = self._now
        if now - node.counted > HAND_OVER:
            self._asked(node.used, there=True)
            node.often = 1.0 + self._worth(node.often, node.counted)
            node.counted = now
        node.read = True
        self._table.end(node.kind, node.at, now, used=True)
        self._duel.leave(node.used)

    def _watch(self, node: Node) -> None:
        node.at, node.kind = self._now, _kind(node)
        self._table.begin(node.kind, node.at)
        self._duel.enter(node.used)
        if self._serial >= self._learned:
            self._learned = self._serial + max(LEARN, self._size // TURN)
            self._table.refresh(self._now)
            self._half_life = self._table.long(LONG) or math.inf

    def _forget(self, ghost: Ghost, used: bool) -> None:
        self._table.end(ghost.kind, ghost.at, self._now, used)
        self._duel.leave(ghost.used)

    def _asked(self, used: int, there: bool) -> None:
        if self._full:
            self._duel.asked(used, there, self._size, self._serial)

    def _worth(self, often: float, since: float) -> float:
        return often * math.exp2((since - self._now) / self._half_life)

    def _uncover(self, node: Node) -> None:
        if node.place < 0 and self._is_leaf(node):
            node.place = len(self._leaves)
            self._leaves.append(node)

    def _cover(self, node: Node) -> None:
        if node.place < 0:
            return
        last = self._leaves.pop()
        if last is not node:
            self._leaves[node.place], last.place = last, node.place
        node.place = -1


def _continues(parent: Node | None) -> bool:
    """Whether a new block goes on from more than a beginning that all may share."""
    if parent is None:
        return False
    new = not parent.read and parent.often == 1.0
    return parent.continues if new else parent.parent is not None


def _kind(node: Node) -> int:
    """The class, as one number. What has come back tells more than what it continues."""
    if node.often > 1.0:
        return 4 * min(1 + int(2.0 * math.log2(node.often)), LEVELS) + node.partial
    return (
        2 * node.continues + node.partial if node.read else -1 - 2 * node.continues - node.partial
    )
