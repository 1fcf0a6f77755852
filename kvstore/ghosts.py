"""A bounded memory of blocks that were evicted: what they were, should they come back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ghost:
    """Of an evicted block what its ``Node`` said."""

    kind: int
    often: float
    at: float
    counted: float
    used: int


class Ghosts:
    """At most ``limit`` of them; those evicted longest ago are forgotten first."""

    def __init__(self) -> None:
        self._ghosts: dict[int, tuple[int, Ghost]] = {}  # by a hash, with the place in the queue
        self._queue: deque[tuple[int, int]] = deque()
        self._serial = 0

    def __len__(self) -> int:
        return len(self._ghosts)

    def put(self, name: bytes, ghost: Ghost, limit: int) -> list[Ghost]:
        """Remember one; those forgotten for it."""
        key = _key(name)
        self._serial += 1
        lost = [] if (old := self._ghosts.get(key)) is None else [old[1]]
        self._ghosts[key] = (self._serial, ghost)
        self._queue.append((self._serial, key))
        while len(self._ghosts) > limit or len(self._queue) > 2 * limit:
            serial, key = self._queue.popleft()
            if (old := self._ghosts.get(key)) is not None and old[0] == serial:
                lost.append(self._ghosts.pop(key)[1])
        return lost

    def take(self, name: bytes) -> Ghost | None:
        """What is remembered of a block that comes back."""
        found = self._ghosts.pop(_key(name), None)
        return None if found is None else found[1]


def _key(name: bytes) -> int:
    return int.from_bytes(name[:8], "little")  # names are digests; who meets is mistaken, no more
