"""A ghost list: a bounded memory of evicted blocks, used if they are stored again."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

GHOST_BYTES = 300
"""Memory of a ghost, measured."""


class Ghost(NamedTuple):
    """The use statistics of an evicted block, see ``EvictionNode``."""

    use_class: int
    uses: float
    used_at: float
    counted_at: float


class GhostList:
    """At most ``limit`` ghosts; the oldest evictions are forgotten first."""

    def __init__(self) -> None:
        self._ghosts: dict[int, Ghost] = {}  # by a part of the name
        self._queue: deque[tuple[int, Ghost]] = deque()

    def __len__(self) -> int:
        return len(self._ghosts)

    def put(self, name: bytes, ghost: Ghost, limit: int) -> list[Ghost]:
        """Remember a block; returns the ghosts forgotten for it."""
        key = _key(name)
        lost = [] if (old := self._ghosts.get(key)) is None else [old]
        self._ghosts[key] = ghost
        self._queue.append((key, ghost))
        while len(self._ghosts) > limit or len(self._queue) > 2 * limit:
            key, old = self._queue.popleft()
            if self._ghosts.get(key) is old:
                lost.append(self._ghosts.pop(key))
        return lost

    def take(self, name: bytes) -> Ghost | None:
        """Remove and return the ghost of a block that is stored again."""
        return self._ghosts.pop(_key(name), None)


def _key(name: bytes) -> int:
    # A name is a digest; two names with equal keys only blur the statistics.
    return int.from_bytes(name[-8:], "little")
