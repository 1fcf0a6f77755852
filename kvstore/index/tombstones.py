"""What the store remembers of blocks that are not there: why the last ones went. Pure.

And, for the first block of a sequence, whether the same tokens are there under another namespace.
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
"""What a reader misses it for."""

MAX_TOMBSTONES = 1 << 16
"""Names remembered; measured, a full memory takes 5 MiB beside the budget."""


class Tombstones:
    """Why blocks went, by a hash of their names, newest last; and openings that stay."""

    def __init__(self, remembered: int = MAX_TOMBSTONES) -> None:
        self._most = remembered
        self._reasons: dict[int, Miss] = {}
        self._openings: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._reasons)

    def added(self, opening: int | None) -> None:
        """A block is there."""
        if opening is not None:
            self._openings[opening] += 1

    def removed(self, name: bytes, opening: int | None, why: Miss) -> None:
        """A block is there no more."""
        key = _key(name)
        self._reasons.pop(key, None)
        self._reasons[key] = why
        if len(self._reasons) > self._most:
            # Many at once: a dictionary looks for its first key past all that were deleted.
            for oldest in list(islice(self._reasons, max(1, self._most >> 10))):
                del self._reasons[oldest]
        if opening is not None:
            self._openings[opening] -= 1
            if not self._openings[opening]:
                del self._openings[opening]

    def reason(self, names: Iterable[bytes], openings: Iterable[int]) -> Miss:
        """Why none of ``names``, each one way to have the same positions, is there.

        ``openings`` are theirs if they begin a sequence.
        """
        known = (self._reasons.get(_key(name)) for name in names)
        if (reason := next(filter(None, known), None)) is not None:
            return reason
        return Miss.OTHER_NAMESPACE if self.knows_opening(openings) else Miss.NEVER_STORED

    def knows_opening(self, openings: Iterable[int]) -> bool:
        """Whether a sequence that is there begins with one of them."""
        return any(opening in self._openings for opening in openings)


def _key(name: bytes) -> int:
    return hash(name)  # 64 bits, and other ones in every process
