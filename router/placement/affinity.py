"""Which worker holds which blocks, as far as this router can know. Pure.

Each worker is believed to hold the blocks of the last prompts that it was sent, as many as its pool
has, so that evicted blocks are forgotten here too. A leg whose usage shows fewer hits than believed
halves what is believed of its worker.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

MAX_WORKERS = 512  # boot tokens; those used longest ago are forgotten


class Affinity:
    """Block names by worker, oldest first."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, OrderedDict[bytes, None]] = OrderedDict()

    def record(self, names: Sequence[bytes], key: str, capacity: int) -> None:
        """The worker ``key``, whose pool has ``capacity`` blocks, was sent this chain just now."""
        held = self._held.setdefault(key, OrderedDict())
        self._held.move_to_end(key)
        for name in reversed(names):  # so that no block is forgotten before the blocks after it
            held[name] = None
            held.move_to_end(name)
        while len(held) > capacity:
            held.popitem(last=False)
        while len(self._held) > MAX_WORKERS:
            self._held.popitem(last=False)

    def forget_half(self, key: str) -> None:
        """Forget the older half of what is believed of a worker: it held less."""
        held = self._held.get(key, OrderedDict())
        for _ in range(len(held) // 2):
            held.popitem(last=False)

    def leading(self, names: Sequence[bytes]) -> Mapping[str, int]:
        """For each worker believed to hold the first of ``names``: how many of them in a row."""
        if not names:
            return {}
        first = names[0]
        return {key: _prefix(held, names) for key, held in self._held.items() if first in held}

    def __len__(self) -> int:
        return sum(len(held) for held in self._held.values())


def _prefix(held: Mapping[bytes, None], names: Sequence[bytes]) -> int:
    """By bisection: a worker that holds a block holds all blocks before it."""
    low, high = 1, len(names)
    while low < high:
        middle = (low + high + 1) // 2
        if names[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low
