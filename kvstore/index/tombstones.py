"""Tombstones: why recently removed blocks were removed. Pure.

And, for the first block of a sequence, whether its tokens are stored under another namespace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from kvrelay.usage import Miss
from kvstore.index.events import RemovalReason

MISS_REASONS = {
    RemovalReason.EVICTED: Miss.EVICTED,
    RemovalReason.EXPIRED: Miss.EXPIRED,
    RemovalReason.CLEARED: Miss.CLEARED,
    RemovalReason.CORRUPT: Miss.FAILED_VERIFICATION,
}
"""The miss that a reader is told for each reason of removal."""

MAX_TOMBSTONES = 1 << 16
"""That many tombstones take 5 MiB beside the budget, measured."""


class Tombstones:
    """Reasons of removal by a hash of the name, newest last; hashes of stored first blocks."""

    def __init__(self, limit: int = MAX_TOMBSTONES) -> None:
        self._limit = limit
        self._reasons: dict[int, Miss] = {}
        self._first_blocks: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._reasons)

    def added(self, first_block_hash: int | None) -> None:
        """A block was stored."""
        if first_block_hash is not None:
            self._first_blocks[first_block_hash] += 1

    def removed(self, name: bytes, first_block_hash: int | None, reason: Miss) -> None:
        """A block was removed."""
        key = _key(name)
        self._reasons.pop(key, None)
        self._reasons[key] = reason
        if len(self._reasons) > self._limit:
            # Many at once: the search for a dictionary's first key passes all deleted ones.
            for oldest in list(islice(self._reasons, max(1, self._limit >> 10))):
                del self._reasons[oldest]
        if first_block_hash is not None:
            self._first_blocks[first_block_hash] -= 1
            if not self._first_blocks[first_block_hash]:
                del self._first_blocks[first_block_hash]

    def reason(self, names: Iterable[bytes], first_block_hashes: Iterable[int]) -> Miss:
        """Why none of ``names``, alternatives for the same positions, is stored.

        ``first_block_hashes`` are given if they begin a sequence.
        """
        known = (self._reasons.get(_key(name)) for name in names)
        if (reason := next(filter(None, known), None)) is not None:
            return reason
        return (
            Miss.OTHER_NAMESPACE
            if self.knows_first_block(first_block_hashes)
            else Miss.NEVER_STORED
        )

    def knows_first_block(self, first_block_hashes: Iterable[int]) -> bool:
        """Whether a stored block begins a sequence with one of ``first_block_hashes``."""
        return any(
            first_block_hash in self._first_blocks for first_block_hash in first_block_hashes
        )


def _key(name: bytes) -> int:
    return hash(name)  # 64 bits, salted anew in every process
