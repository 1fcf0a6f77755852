"""Who may rely on which blocks, and until when. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvstore.book.deadlines import Deadlines
from kvstore.book.keys import prefix_of

LEAST_LOAD = 64
"""What a lease costs beside its names: about as much memory."""


class Leases:
    """Names by lease; each ends by itself at its deadline."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[bytes, ...]] = {}
        self._ends: Deadlines[int] = Deadlines()
        self._load: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._names)

    def give(self, lease: int, names: tuple[bytes, ...], deadline: float) -> None:
        """A new one."""
        self._names[lease] = names
        self._ends.set(lease, deadline)
        self._count(names, 1)

    def end(self, lease: int) -> tuple[bytes, ...]:
        """What it held; nothing if it has ended already."""
        self._ends.drop(lease)
        names = self._names.pop(lease, ())
        self._count(names, -1)
        return names

    def names(self, lease: int) -> tuple[bytes, ...] | None:
        """What it holds; ``None`` once it has ended."""
        return self._names.get(lease)

    def extend(self, lease: int, deadline: float) -> bool:
        """Move its end; false when it has ended already."""
        if lease not in self._names:
            return False
        self._ends.set(lease, deadline)
        return True

    def strike(self, name: bytes) -> None:
        """No lease holds it any more. Rare: all of them are looked through."""
        for lease, names in self._names.items():
            if name in names:
                self._names[lease] = left = tuple(one for one in names if one != name)
                self._count(names, -1)
                self._count(left, 1)

    def load(self, owner: bytes) -> int:
        """What all leases of a tenant cost, in names; ``owner`` is its part of their keys."""
        return self._load[owner]

    def held(self) -> int:
        """The sum of all lengths."""
        return sum(map(len, self._names.values()))

    def deadlines(self) -> int:
        """As many as there are leases, unless there is a bug."""
        return len(self._ends)

    def quiet(self, now: float) -> bool:
        """Whether certainly none is due."""
        return self._ends.quiet(now)

    def due(self, now: float) -> Iterator[int]:
        """Those whose time is over; they must be ended."""
        return self._ends.due(now)

    def _count(self, names: tuple[bytes, ...], times: int) -> None:
        if names:
            self._load[prefix_of(names[0])] += times * (LEAST_LOAD + len(names))
