"""Figures of a store: what it holds now, and what it has done since it started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace


@dataclass(slots=True)
class StoreCounters:
    """Counts of events, in blocks unless said otherwise. They only grow."""

    lookups: int = 0  # calls
    hits: int = 0  # names a lookup found
    misses: int = 0  # names a lookup asked for and did not find
    served: int = 0  # blocks handed out by a get
    absent: int = 0  # blocks a get asked for that were not there
    stored: int = 0
    existed: int = 0  # put again, and not copied
    pending: int = 0  # put while another writer was at it
    rejected: int = 0  # no room
    corrupt: int = 0  # not what the header says: refused, or taken out later
    abandoned: int = 0  # reservations given up or run out
    evicted: int = 0
    expired: int = 0  # partial blocks whose life was over
    cleared: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass(slots=True)
class DiskCounters:
    """Counts in blocks unless said otherwise, since the start. They only grow."""

    written: int = 0
    read: int = 0  # brought back into memory
    restored: int = 0  # found at the start
    dropped: int = 0  # there was no room for them any more
    skipped: int = 0  # left memory before they were written, or are too large
    failed: int = 0  # writes that the system refused; they are tried again
    corrupt: int = 0  # were not what had been written, when they were read
    damaged: int = 0  # records that were not whole, at the start
    bytes_written: int = 0
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class DiskStats:
    """One reading. ``bytes`` are those of all files, ``unsaved`` blocks are yet to be written."""

    budget: int
    bytes: int
    entries: int
    unsaved: int
    counters: DiskCounters


@dataclass(frozen=True, slots=True)
class TenantStats:
    """What a tenant has in memory now; ``name`` is empty for services. Sizes are in bytes."""

    name: str
    quota: int
    entries: int
    bytes: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """One reading. ``bytes`` include what is reserved; ``leased_bytes`` cannot be evicted now."""

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
    tenants: tuple[TenantStats, ...] = ()  # told to admins only


def total_stats(found: Sequence[StoreStats]) -> StoreStats:
    """The sums of several readings, at least one; ``boot`` is all of theirs."""
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
