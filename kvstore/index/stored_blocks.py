"""The blocks that are there: what they take, who holds them, how long partial ones live. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from kvstore.index.deadlines import Deadlines
from kvstore.index.entries import IndexEntry
from kvstore.index.eviction.policy import EvictionPolicy
from kvstore.index.leases import LeaseTable

V = TypeVar("V")


class StoredBlocks(dict[bytes, IndexEntry[V]]):
    """By name. They come by ``add`` and go by ``take``; ``leased`` bytes are held by a lease.

    Those are the bytes of ``holding`` blocks. One that was taken while leases hold it counts on,
    out of reach, until the last of them has ended.
    """

    def __init__(self, policy: EvictionPolicy, partial_life: float) -> None:
        super().__init__()
        self._policy = policy
        self._partial_life = partial_life
        self._leases: LeaseTable[V] = LeaseTable()
        self._taken: set[IndexEntry[V]] = set()  # and held still
        self._lives: Deadlines[bytes] = Deadlines()
        self.bytes = self.leased = self.holding = 0

    @property
    def leases(self) -> int:
        """How many there are."""
        return len(self._leases)

    def add(self, entry: IndexEntry[V], now: float) -> None:
        """A block is there."""
        self[entry.name] = entry
        self.bytes += entry.size
        self._policy.add(entry, self.get(entry.parent or b""))
        self._extend_life(entry, now)

    def take(self, name: bytes) -> IndexEntry[V]:
        """A block is there no more; its place is free unless leases hold it."""
        entry = self.pop(name)
        if entry.leases:
            self._taken.add(entry)
        else:
            self.bytes -= entry.size
        self._policy.remove(entry, self.get(entry.parent or b""))
        self._lives.drop(name)
        return entry

    def use(self, entry: IndexEntry[V], now: float) -> None:
        """It was used just now."""
        self._policy.touch(entry)
        self._extend_life(entry, now)

    def hold(
        self, lease: int, entries: tuple[IndexEntry[V], ...], deadline: float, now: float
    ) -> None:
        """A new lease on what is there, or held by another lease."""
        for entry in entries:
            if entry.partial and entry not in self._taken:
                self._extend_life(entry, now)
            if entry.leases == 0:  # that it was used is noted when it is free again
                self._policy.hold(entry)
                self.leased += entry.size
                self.holding += 1
            entry.leases += 1
        self._leases.give(lease, entries, deadline)

    def leased_blocks(self, lease: int) -> tuple[IndexEntry[V], ...] | None:
        """What it holds; ``None`` once it has ended."""
        return self._leases.blocks(lease)

    def load(self, owner: bytes) -> int:
        """See ``LeaseTable.load``."""
        return self._leases.load(owner)

    def extend(self, lease: int, deadline: float) -> bool:
        """Move its end; false when it has ended already."""
        return self._leases.extend(lease, deadline)

    def release(self, lease: int) -> list[IndexEntry[V]]:
        """End a lease; unknown ones have ended already. The taken ones that nobody holds now."""
        gone = []
        for entry in reversed(self._leases.end(lease)):
            entry.leases -= 1
            if entry.leases == 0 and self._free(entry):
                gone.append(entry)
        return gone

    def revoke(self, entry: IndexEntry[V]) -> None:
        """No lease holds it any more: it is damaged."""
        if entry.leases:
            self._leases.revoke(entry)
            entry.leases = 0
            self._free(entry)

    def nothing_due(self, now: float) -> bool:
        """Whether certainly no lease and no life is over."""
        return self._leases.nothing_due(now) and self._lives.nothing_due(now)

    def expired_leases(self, now: float) -> Iterator[int]:
        """Leases whose time is over; they must be released."""
        return self._leases.due(now)

    def expired_partials(self, now: float) -> list[bytes]:
        """Partial blocks whose life is over, to be taken out. Those that are held live on."""
        due = list(self._lives.due(now))
        for name in due:
            if self[name].leases:
                self._extend_life(self[name], now)
        return [name for name in due if not self[name].leases]

    def sums(self) -> Mapping[str, tuple[int, int]]:
        """What is counted, and the same counted anew: equal unless there is a bug."""
        entries = [*self.values(), *self._taken]
        return {
            "bytes": (self.bytes, sum(entry.size for entry in entries)),
            "leased": (self.leased, sum(entry.size for entry in entries if entry.leases)),
            "holding": (self.holding, sum(entry.leases > 0 for entry in entries)),
            "leases": (self._leases.held(), sum(entry.leases for entry in entries)),
            "deadlines": (self._leases.deadlines(), len(self._leases)),
            "lives": (len(self._lives), sum(entry.partial for entry in self.values())),
        }

    def _free(self, entry: IndexEntry[V]) -> bool:
        """No lease holds it any more; whether it was taken before."""
        self.leased -= entry.size
        self.holding -= 1
        if entry not in self._taken:
            self._policy.free(entry)
            return False
        self._taken.remove(entry)
        self.bytes -= entry.size
        return True

    def _extend_life(self, entry: IndexEntry[V], now: float) -> None:
        if entry.partial:
            self._lives.set(entry.name, now + self._partial_life)
