"""Tombstones: why recently removed blocks were removed. Pure.

And, for the first block of a sequence, whether its tokens are stored under another namespace or
numeric profile. That is read only if the first block is absent, so a lookup that hits pays nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from kvrelay.block.name import FAMILY_BITS
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
TOMBSTONE_BYTES = 120
"""Memory of a tombstone, measured."""


class Tombstones:
    """Reasons of removal by a hash of the name, newest last; hashes of stored first blocks."""

    def __init__(self, limit: int = MAX_TOMBSTONES) -> None:
        self._limit = limit
        self._reasons: dict[int, Miss] = {}
        self._first_blocks: Counter[int] = Counter()  # by hash
        self._contents: Counter[int] = Counter()  # by the part that all namespaces share

    def __len__(self) -> int:
        return len(self._reasons)

    @property
    def overhead_bytes(self) -> int:
        """The memory of all tombstones."""
        return TOMBSTONE_BYTES * len(self)

    def added(self, first_block_hash: int | None) -> None:
        """A block was stored."""
        if first_block_hash is not None:
            self._first_blocks[first_block_hash] += 1
            self._contents[first_block_hash >> FAMILY_BITS] += 1

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
            _take_one(self._first_blocks, first_block_hash)
            _take_one(self._contents, first_block_hash >> FAMILY_BITS)

    def reason(self, names: Iterable[bytes], first_block_hashes: Iterable[int]) -> Miss:
        """Why none of ``names``, alternatives for the same positions, is stored.

        ``first_block_hashes`` are given if they begin a sequence.
        """
        known = (self._reasons.get(_key(name)) for name in names)
        if (reason := next(filter(None, known), None)) is not None:
            return reason
        return self.elsewhere(first_block_hashes) or Miss.NEVER_STORED

    def elsewhere(self, first_block_hashes: Iterable[int]) -> Miss | None:
        """Under what other namespace a stored block begins a sequence with one of the hashes.

        The block that was looked up is absent, so one with the same hash has another profile.
        """
        hashes = tuple(first_block_hashes)
        if any(number in self._first_blocks for number in hashes):
            return Miss.OTHER_NUMERICS
        known = any(number >> FAMILY_BITS in self._contents for number in hashes)
        return Miss.OTHER_NAMESPACE if known else None


def _take_one(counter: Counter[int], key: int) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


def _key(name: bytes) -> int:
    return hash(name)  # 64 bits, salted anew in every process
