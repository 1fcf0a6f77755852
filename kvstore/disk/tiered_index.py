"""The index of a store with a disk tier below its memory. Pure: the caller does the I/O.

Every full block is saved to disk, in the order in which blocks are stored, so evicting a block from
memory only forgets it there. A block on disk counts as stored. A lease on it, or a ``Locate``,
loads it: from then on it has an entry and a place, and it is ``ready`` when its bytes are verified.
A damaged block is taken out of the leases that hold it and is a miss.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence

from kvstore.base import Lease, LookupResult, SurveyResult, Tail
from kvstore.claims import Claim
from kvstore.disk.record import record_bytes
from kvstore.disk.segment_index import (
    LOCATION_BYTES,
    DiskLocation,
    SegmentIndex,
    entry_on_disk,
)
from kvstore.disk.write_queue import WriteQueue
from kvstore.index.block_index import BlockIndex, IndexOptions
from kvstore.index.entries import IndexEntry, PlaceAllocator
from kvstore.index.events import RemovalReason
from kvstore.index.eviction.policy import EvictionPolicy
from kvstore.index.eviction.victims import QuotaPolicy, ReportFailure, ignore_failure
from kvstore.stats import DiskCounters, DiskStats, StoreStats

HELD_SECONDS = 60.0
"""Longer than one call takes: loading blocks of a call evicts none of its blocks in memory."""


NO_WRITER = 0
"""In place of a ticket: a block that is loaded has no writer."""


class TieredIndex(BlockIndex[int]):
    """A ``BlockIndex`` of places; ``segments`` is the index of the disk."""

    def __init__(
        self,
        options: IndexOptions,
        policy: EvictionPolicy | QuotaPolicy[int],
        allocator: PlaceAllocator[int],
        segments: SegmentIndex,
        report: ReportFailure = ignore_failure,
    ) -> None:
        super().__init__(options, policy, allocator, report)
        self.segments = segments
        self.disk = DiskCounters()
        self._write_queue = WriteQueue()
        self._reads: deque[tuple[IndexEntry[int], DiskLocation]] = deque()
        self._loading_bytes = 0  # bytes of blocks that are not ready

    def lookup(
        self,
        names: Sequence[bytes],
        tails: Sequence[Tail],
        ttl: float,
        now: float,
        first_block_hashes: Sequence[int] = (),
    ) -> LookupResult:
        """See ``BlockIndex.lookup``; a lease on blocks on disk loads them."""
        self.expire(now)
        kept = self._load(names, now, run=True) if ttl > 0 else []
        held = super().lookup(names, tails, ttl, now, first_block_hashes)
        self._release_all(kept)
        return held

    def survey(
        self, names: Sequence[bytes], ttl: float, now: float, first_block_hashes: Sequence[int] = ()
    ) -> SurveyResult:
        """See ``BlockIndex.survey``; a lease on blocks on disk loads them."""
        self.expire(now)
        if ttl > 0:
            kept = self._load(names, now)
            found = super().survey(names, ttl, now, first_block_hashes)
            self._release_all(kept)
            return found
        found = super().survey(names, ttl, now, first_block_hashes)
        on_disk = [
            self.segments.find(name) if size is None else None
            for name, size in zip(names, found.sizes, strict=True)
        ]
        count = sum(location is not None for location in on_disk)
        self.counters.hits += count
        self.counters.misses -= count
        sizes = tuple(
            size if location is None else location.size
            for size, location in zip(found.sizes, on_disk, strict=True)
        )
        misses = tuple(
            miss if location is None else None
            for miss, location in zip(found.misses, on_disk, strict=True)
        )
        return dataclasses.replace(found, sizes=sizes, misses=misses)

    def load(self, names: Sequence[bytes], now: float) -> bool:
        """Load the blocks that are on disk; returns whether any of ``names`` is being loaded."""
        self.expire(now)
        self._release_all(self._load(names, now))
        return self.is_loading(names)

    def is_loading(self, names: Iterable[bytes]) -> bool:
        """Whether any of ``names`` is being loaded."""
        entries = (self._entries.get(name) for name in names)
        return any(entry is not None and not entry.ready for entry in entries)

    def next_read(self) -> tuple[IndexEntry[int], DiskLocation] | None:
        """A block to read into its place, and its location; ``finish_read`` must follow."""
        return self._reads.popleft() if self._reads else None

    def finish_read(self, entry: IndexEntry[int], location: DiskLocation, good: bool) -> None:
        """A block was read; ``good``: its bytes are right."""
        self._loading_bytes -= entry.size
        self.segments.unpin(location.segment)
        if good:
            entry.ready = True
            self.disk.read += 1
            self.disk.bytes_read += entry.size
            if entry.name not in self.segments and self._entries.get(entry.name) is entry:
                self._save(entry)  # its segment was dropped meanwhile
        elif self.segments.forget(location):
            self.disk.corrupt += 1
            if entry.name not in self._entries:
                super()._record_removed(entry, RemovalReason.CORRUPT)
        if not good and self._entries.get(entry.name) is entry:
            self._entries.revoke(entry)
            self._remove(entry.name, RemovalReason.CORRUPT)
        self._end_io(entry)

    def next_writes(self, limit: int) -> list[IndexEntry[int]]:
        """Blocks to write, about ``limit`` bytes; ``finish_write`` or ``abandon_write`` follows."""
        batch = self._write_queue.take(limit)
        for entry in batch:
            entry.io_count += 1
        return batch

    def finish_write(
        self, segment: int, nbytes: int, batch: Sequence[IndexEntry[int]], offsets: Sequence[int]
    ) -> None:
        """A batch is in ``segment`` at ``offsets``; the segment is ``nbytes`` long now.

        Blocks that have proved wrong meanwhile do not count.
        """
        if not self.segments.holds(segment):  # cleared meanwhile
            self.abandon_write(batch)
            return
        self.segments.grow(segment, nbytes)
        new = self.segments.add(
            DiskLocation(e.name, e.parent, e.size, e.tokens, segment, offset, e.first_block_hash)
            for e, offset in zip(batch, offsets, strict=True)
            if e.ready
        )
        added = {location.name for location in new}
        for entry in batch:
            self._end_io(entry)
            if not entry.ready:
                continue
            self._write_queue.drop(entry.name)
            entry.reused = False
            self.disk.written += 1
            self.disk.bytes_written += entry.size
            if entry.name in added and entry.name not in self._entries:
                super()._record_added(entry)  # evicted meanwhile, stored again
        self._write_queue.end(len(batch))

    def abandon_write(self, batch: Sequence[IndexEntry[int]], failed: bool = False) -> None:
        """A batch was not written: queue again the blocks that are still stored."""
        self.disk.failed += len(batch) if failed else 0
        there = [e for e in batch if self._entries.get(e.name) is e and e.name not in self.segments]
        self._write_queue.end(len(batch), again=there)
        for entry in batch:
            self._end_io(entry)

    def unsaved(self) -> int:
        """The number of blocks that wait for writing or are being written."""
        return len(self._write_queue)

    def save_all(self) -> None:
        """Queue every full block that is in memory only; blocks in memory count as used last."""
        for name, entry in self._entries.items():
            self.segments.touch(name)
            if not entry.partial and entry.ready and name not in self.segments:
                self._save(entry)

    def make_room_on_disk(self, nbytes: int, spared: int | None) -> list[int] | None:
        """Drop segments to make room for ``nbytes``; returns them, ``None`` if there is no room."""
        dropped: list[int] = []
        while self.segments.bytes + nbytes > self.segments.budget:
            if (segment := self.segments.victim(spared)) is None:
                return dropped or None
            self.drop_segment(segment)
            dropped.append(segment)
        return dropped

    def drop_segment(self, segment: int) -> None:
        """Drop a segment. Its blocks that were reused and are still in memory are saved again."""
        if not self.segments.holds(segment):
            return
        for location in self.segments.drop(segment):
            entry = self._entries.get(location.name)
            if entry is None:
                self.disk.dropped += 1
                super()._record_removed(entry_on_disk(location), RemovalReason.EVICTED)
            elif entry.reused and entry.ready:
                self._save(entry)

    def restored(self, locations: Iterable[DiskLocation], damaged: int = 0) -> None:
        """Add blocks of an earlier start, and count records that were ``damaged``."""
        self.disk.damaged += damaged
        for location in self.segments.add(locations):
            self.disk.restored += 1
            if location.name not in self._entries:
                self.events.add(entry_on_disk(location))
            else:
                self._write_queue.drop(location.name)

    def clear(self, now: float) -> int:
        """See ``BlockIndex.clear``; drops every segment too."""
        self.expire(now)
        on_disk = 0
        for segment in self.segments.by_age():
            for location in self.segments.drop(segment):
                if location.name not in self._entries:
                    on_disk += 1
                    super()._record_removed(entry_on_disk(location), RemovalReason.CLEARED)
        self.counters.cleared += on_disk
        removed = super().clear(now)
        self.save_all()
        return on_disk + removed

    def find(self, name: bytes, now: float) -> IndexEntry[int] | None:
        """See ``BlockIndex.find``; a block that is not ``ready`` is on disk."""
        entry = super().find(name, now)
        location = self.segments.find(name) if entry is None else None
        return entry if location is None else entry_on_disk(location)

    def stats(self) -> StoreStats:
        stats = super().stats()
        return dataclasses.replace(
            stats,
            overhead_bytes=stats.overhead_bytes + LOCATION_BYTES * len(self.segments),
            disk=DiskStats(
                self.segments.budget,
                self.segments.bytes,
                len(self.segments),
                self.unsaved(),
                dataclasses.replace(self.disk),
            ),
        )

    def audit(self) -> list[str]:
        coming = sum(e.size for e in self._entries.values() if not e.ready)
        wrong = super().audit()
        if coming > self._loading_bytes:
            wrong.append(f"coming: {self._loading_bytes} is less than {coming}")
        if self.segments.bytes > self.segments.budget:
            wrong.append(f"disk: {self.segments.bytes} is more than {self.segments.budget}")
        both = [name for name in self._write_queue if name in self.segments]
        return wrong + ([f"{len(both)} are on disk and unsaved"] if both else [])

    def _load(self, names: Sequence[bytes], now: float, run: bool = False) -> list[Lease]:
        """Load blocks, of a ``run`` up to its first gap; returns leases that hold them."""
        kept: list[Lease] = []
        for at, name in enumerate(names):
            if name in self._entries:
                continue
            if (location := self.segments.find(name)) is None:
                if run:
                    break
                continue
            if not kept:
                known = names[:at] if run else names
                there = [self._entries[name] for name in known if name in self._entries]
                kept.append(self._hold(there, now + HELD_SECONDS, now))
            if not self._start_read(location, now):
                break
            kept.append(self._hold((self._entries[name],), now + HELD_SECONDS, now))
        return kept

    def _start_read(self, location: DiskLocation, now: float) -> bool:
        """Give a block a place and queue its read; false if there is no place."""
        # One block of any size may be loaded.
        crowded = (
            self._loading_bytes and self._loading_bytes + location.size > self._options.budget // 2
        )
        if crowded or location.name in self.reservations:
            return False
        claim = Claim(location.name, location.size, False, location.first_block_hash)
        writing = self._make_room(claim, NO_WRITER)
        if writing is None or writing.place is None:
            return False
        entry = IndexEntry(claim, writing.place, location.parent, location.tokens)
        entry.ready = False
        entry.io_count = 1
        self._entries.add(entry, now)
        self._loading_bytes += location.size
        self.segments.touch(location.name)
        self.segments.pin(location.segment)
        self._reads.append((entry, location))
        return True

    def _release_all(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self.release(lease.id)

    def _save(self, entry: IndexEntry[int]) -> None:
        """Queue a block for writing, unless it is too large for the disk."""
        if 2 * record_bytes(entry.size) > self.segments.budget:
            self.disk.skipped += 1
        else:
            self._write_queue.add(entry)

    def _end_io(self, entry: IndexEntry[int]) -> None:
        """A read or write at the block's place has ended."""
        entry.io_count -= 1
        held = entry.io_count or entry.leases
        if not held and self._entries.get(entry.name) is not entry:
            self.free_place(entry.value, entry.size)

    def _hold(self, entries: Iterable[IndexEntry[int]], deadline: float, now: float) -> Lease:
        held = tuple(entries)
        for entry in held:
            entry.reused = True
        return super()._hold(held, deadline, now)

    def _lead(self, names: Sequence[bytes], held: bool) -> int:
        lead = super()._lead(names, held)
        while not held and lead < len(names) and self._is_stored(names[lead]):
            lead += 1
        return lead

    def _sizes(self, names: Sequence[bytes]) -> tuple[int, ...]:
        found = (self._entries.get(name) or self.segments.find(name) for name in names)
        return tuple(block.size for block in found if block is not None)

    def _is_stored(self, name: bytes) -> bool:
        if name in self._entries:
            return True
        self.segments.touch(name)
        return name in self.segments

    def _record_added(self, entry: IndexEntry[int]) -> None:
        if entry.name in self.segments:
            entry.first_block_hash = None  # counted once
            return
        super()._record_added(entry)
        if not entry.partial:
            self._save(entry)

    def _record_removed(self, entry: IndexEntry[int], reason: RemovalReason) -> None:
        unsaved = self._write_queue.drop(entry.name)
        if (location := self.segments.find(entry.name)) is not None:
            location.first_block_hash = entry.first_block_hash
            if entry.reused:
                self.segments.touch(entry.name)
            return
        super()._record_removed(entry, reason)
        self.disk.skipped += unsaved and reason is RemovalReason.EVICTED
