"""Figures of a store: its content now, and counters since its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace


@dataclass(slots=True)
class StoreCounters:
    """Counts of events, in blocks unless said otherwise. They only grow."""

    lookups: int = 0  # calls
    hits: int = 0  # names that a lookup found
    misses: int = 0  # names a lookup asked for and did not find
    served: int = 0  # blocks that a get sent
    absent: int = 0  # blocks that a get asked for in vain
    stored: int = 0
    existed: int = 0  # put again, not copied
    pending: int = 0  # put while another writer was sending it
    rejected: int = 0  # no room
    orphaned: int = 0  # refused: the parent is absent
    corrupt: int = 0  # not what the header says: refused, or removed later
    abandoned: int = 0  # reservations given up or expired
    evicted: int = 0
    expired: int = 0  # partial blocks whose time was over
    cleared: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    eviction_failures: int = 0  # errors of the eviction policy, which LRU replaced
    hints_received: int = 0
    hints_refused: int = 0  # the tenant's part, or the table, was full
    hints_used: int = 0  # the blocks were used while the hint held
    hints_expired: int = 0
    hints_yielded: int = 0  # nothing else was left to evict, or nearer use took the room


@dataclass(slots=True)
class DiskCounters:
    """Counts in blocks unless said otherwise, since the start. They only grow."""

    written: int = 0
    read: int = 0  # brought back into memory
    restored: int = 0  # found at the start
    dropped: int = 0  # for want of room
    skipped: int = 0  # evicted before they were written, or too large
    failed: int = 0  # writes that the system refused, to be retried
    corrupt: int = 0  # not what had been written
    damaged: int = 0  # incomplete records at the start
    bytes_written: int = 0
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class DiskStats:
    """One reading. ``bytes`` is the sum of all files, ``unsaved`` blocks are yet to be written."""

    budget: int
    bytes: int
    entries: int
    unsaved: int
    counters: DiskCounters


@dataclass(frozen=True, slots=True)
class TenantStats:
    """A tenant's content in memory; ``name`` is empty for services. Sizes are in bytes."""

    name: str
    quota: int
    entries: int
    bytes: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """One reading. ``bytes`` include what is reserved; ``leased_bytes`` cannot be evicted now.

    ``overhead_bytes`` is the memory of the store's bookkeeping, not part of the budget: tombstones,
    events, leases, the memory of the eviction policy, and locations on disk.
    """

    boot: bytes
    budget: int
    entries: int
    bytes: int
    reserved_bytes: int
    leased_bytes: int
    leases: int
    reservations: int
    counters: StoreCounters
    disk: DiskStats | None = None
    eviction: str = ""  # the policy's name
    overhead_bytes: int = 0
    tenants: tuple[TenantStats, ...] = ()  # for admins only


def total_stats(found: Sequence[StoreStats]) -> StoreStats:
    """The sums of several readings, at least one; ``boot`` joins their boots."""
    sums = {
        field.name: sum(getattr(stats, field.name) for stats in found)
        for field in fields(StoreStats)
        if field.type == "int"
    }
    readings = [stats.counters for stats in found]
    counters = {
        f.name: sum(getattr(one, f.name) for one in readings) for f in fields(StoreCounters)
    }
    boot = b"".join(stats.boot for stats in found)
    tenants = tuple(tenant for stats in found for tenant in stats.tenants)
    return replace(found[0], boot=boot, counters=StoreCounters(**counters), tenants=tenants, **sums)
