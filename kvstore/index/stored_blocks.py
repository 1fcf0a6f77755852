"""The stored blocks: their bytes, the leases on them, the lifetime of partial blocks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from kvstore.claims import Claim
from kvstore.index.deadlines import Deadlines
from kvstore.index.entries import IndexEntry
from kvstore.index.eviction.policy import EvictionPolicy
from kvstore.index.eviction.victims import QuotaPolicy, ReportFailure, SafePolicy
from kvstore.index.leases import LeaseTable

V = TypeVar("V")


class StoredBlocks(dict[bytes, IndexEntry[V]]):
    """Entries by name, changed by ``add`` and ``remove`` only.

    ``leased`` bytes, of ``leased_count`` blocks, are held by leases. A block that is removed while
    leases hold it is no longer found, but counts until its last lease has ended.
    """

    def __init__(
        self, policy: EvictionPolicy | QuotaPolicy[V], partial_life: float, report: ReportFailure
    ) -> None:
        super().__init__()
        self.policy: SafePolicy[V] | QuotaPolicy[V] = (
            policy if isinstance(policy, QuotaPolicy) else SafePolicy(policy, self, report)
        )
        self._partial_life = partial_life
        self.leases: LeaseTable[V] = LeaseTable()
        self._removed: set[IndexEntry[V]] = set()  # and still held by leases
        self._lives: Deadlines[bytes] = Deadlines()
        self.bytes = 0
        self.leased = 0
        self.leased_count = 0

    def add(self, entry: IndexEntry[V], now: float) -> None:
        """Store a block."""
        self[entry.name] = entry
        self.bytes += entry.size
        self.policy.add(entry, self.get(entry.parent or b""))
        self._extend_life(entry, now)

    def remove(self, name: bytes) -> IndexEntry[V]:
        """Remove a block; its place is free unless leases hold it."""
        entry = self.pop(name)
        if entry.leases:
            self._removed.add(entry)
        else:
            self.bytes -= entry.size
        self.policy.remove(entry, self.get(entry.parent or b""))
        self._lives.drop(name)
        return entry

    def cover(self, claim: Claim) -> None:
        """The claimed block is being written: the block that it continues is not evicted."""
        if claim.parent is not None:
            self.policy.cover(claim.parent, self.get(claim.parent))

    def uncover(self, claim: Claim) -> None:
        """The write has ended."""
        if claim.parent is not None:
            self.policy.uncover(claim.parent, self.get(claim.parent))

    def use(self, entry: IndexEntry[V], now: float) -> None:
        """The block was used now."""
        self.policy.touch(entry)
        self._extend_life(entry, now)

    def hold(
        self, lease: int, entries: tuple[IndexEntry[V], ...], deadline: float, now: float
    ) -> None:
        """A new lease on blocks that are stored, or held by another lease."""
        for entry in entries:
            if entry.partial and entry not in self._removed:
                self._extend_life(entry, now)
            if entry.leases == 0:  # its use is recorded when the last lease ends
                self.policy.hold(entry)
                self.leased += entry.size
                self.leased_count += 1
            entry.leases += 1
        self.leases.add(lease, entries, deadline)

    def release(self, lease: int) -> list[IndexEntry[V]]:
        """End a lease, if it has not ended; returns removed blocks whose last lease it was."""
        freed = []
        for entry in reversed(self.leases.end(lease)):
            entry.leases -= 1
            if entry.leases == 0 and self._free(entry):
                freed.append(entry)
        return freed

    def revoke(self, entry: IndexEntry[V]) -> None:
        """Take a damaged block out of every lease."""
        if entry.leases:
            self.leases.revoke(entry)
            entry.leases = 0
            self._free(entry)

    def nothing_due(self, now: float) -> bool:
        """Whether certainly no lease and no partial block has expired."""
        return self.leases.ends.nothing_due(now) and self._lives.nothing_due(now)

    def expired_partials(self, now: float) -> list[bytes]:
        """Partial blocks whose time is over, to be removed. Leased ones live on."""
        due = list(self._lives.due(now))
        for name in due:
            if self[name].leases:
                self._extend_life(self[name], now)
        return [name for name in due if not self[name].leases]

    def sums(self) -> Mapping[str, tuple[int, int]]:
        """Pairs of a running sum and the same sum counted anew; they differ only by a bug."""
        entries = [*self.values(), *self._removed]
        return {
            "bytes": (self.bytes, sum(entry.size for entry in entries)),
            "leased": (self.leased, sum(entry.size for entry in entries if entry.leases)),
            "leased_count": (self.leased_count, sum(entry.leases > 0 for entry in entries)),
            "leases": (self.leases.total_blocks(), sum(entry.leases for entry in entries)),
            "deadlines": (len(self.leases.ends), len(self.leases)),
            "lives": (len(self._lives), sum(entry.partial for entry in self.values())),
        }

    def _free(self, entry: IndexEntry[V]) -> bool:
        """The last lease on a block ended; returns whether the block had been removed."""
        self.leased -= entry.size
        self.leased_count -= 1
        if entry not in self._removed:
            self.policy.free(entry)
            return False
        self._removed.remove(entry)
        self.bytes -= entry.size
        return True

    def _extend_life(self, entry: IndexEntry[V], now: float) -> None:
        if entry.partial:
            self._lives.set(entry.name, now + self._partial_life)
