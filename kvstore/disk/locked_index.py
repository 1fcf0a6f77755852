"""The tiered index for the threads of the disk tier: each step under the store's lock, no I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.disk.segment_index import DiskLocation
from kvstore.disk.tiered_index import TieredIndex
from kvstore.index.entries import IndexEntry


@dataclass(frozen=True, slots=True)
class ReadJob:
    """A block to read into its place."""

    entry: IndexEntry[int]
    location: DiskLocation


class LockedIndex:
    """Thread-safe. ``notify`` is called, in any thread, when a read has finished or failed."""

    def __init__(
        self, index: TieredIndex, lock: threading.Lock, notify: Callable[[], None]
    ) -> None:
        self._index = index
        self._lock = lock
        self._notify = notify
        self._read_finished = threading.Condition(lock)
        self._read_wanted = threading.Condition(lock)
        self._write_wanted = threading.Condition(lock)

    def wake(self) -> None:
        """Wake the readers and the writer; call it under the lock."""
        self._write_wanted.notify()
        self._read_wanted.notify_all()

    def load(self, names: Sequence[bytes]) -> bool:
        """See ``TieredIndex.load``."""
        with self._lock:
            loading = self._index.load(names, time.monotonic())
            self._read_wanted.notify_all()
            return loading

    def is_loading(self, names: Sequence[bytes]) -> bool:
        """See ``TieredIndex.is_loading``."""
        with self._lock:
            return self._index.is_loading(names)

    def has(self, name: bytes) -> bool:
        """Whether the block is on disk."""
        return name in self._index.segments

    def location(self, name: bytes) -> DiskLocation | None:
        """The block's location on disk."""
        return self._index.segments.find(name)

    def wait_for(self, names: Sequence[bytes], seconds: float) -> None:
        """Return when none of ``names`` is being loaded, or after ``seconds``."""
        with self._lock:
            self._read_finished.wait_for(lambda: not self._index.is_loading(names), seconds)

    def next_read(self, seconds: float) -> ReadJob | None:
        """The next block to read; ``None`` if there is none for ``seconds``."""
        with self._lock:
            wanted = self._index.next_read()
            if wanted is None:
                self._read_wanted.wait(seconds)
                wanted = self._index.next_read()
        return None if wanted is None else ReadJob(*wanted)

    def finish_read(self, job: ReadJob, good: bool) -> bool:
        """See ``TieredIndex.finish_read``; returns whether the segment's file is still needed."""
        with self._lock:
            self._index.finish_read(job.entry, job.location, good)
            self._read_finished.notify_all()
            needed = self._index.segments.needs(job.location.segment)
        self._notify()
        return needed

    def next_writes(self, limit: int, seconds: float) -> list[IndexEntry[int]]:
        """The next blocks to write; empty if there are none for ``seconds``."""
        with self._lock:
            batch = self._index.next_writes(limit)
            if not batch:
                self._write_wanted.wait(seconds)
                batch = self._index.next_writes(limit)
            return batch

    def finish_write(
        self, segment: int, nbytes: int, batch: Sequence[IndexEntry[int]], offsets: Sequence[int]
    ) -> None:
        """See ``TieredIndex.finish_write``."""
        with self._lock:
            self._index.finish_write(segment, nbytes, batch, offsets)

    def abandon_write(self, batch: Sequence[IndexEntry[int]], failed: bool) -> None:
        """See ``TieredIndex.abandon_write``."""
        with self._lock:
            self._index.disk.failed += len(batch) if failed else 0
            self._index.abandon_write(batch)

    def make_room(self, nbytes: int, spared: int | None) -> list[int] | None:
        """See ``TieredIndex.make_room_on_disk``."""
        with self._lock:
            return self._index.make_room_on_disk(nbytes, spared)

    def oldest(self) -> int | None:
        """The least recently used segment."""
        with self._lock:
            return self._index.segments.victim(None)

    def drop(self, segment: int) -> None:
        """Forget a segment."""
        with self._lock:
            if self._index.segments.holds(segment):
                self._index.drop_segment(segment)

    def open(self, segment: int, nbytes: int) -> None:
        """Add a segment file."""
        with self._lock:
            self._index.segments.open(segment, nbytes)

    def holds(self, segment: int) -> bool:
        """Whether the segment is in the index."""
        with self._lock:
            return self._index.segments.holds(segment)

    def needs(self, segment: int) -> bool:
        """Whether the segment's file must stay."""
        with self._lock:
            return self._index.segments.needs(segment)

    def segments(self) -> list[int]:
        """The segments, least recently used first."""
        with self._lock:
            return self._index.segments.by_age()

    def restored(self, locations: Sequence[DiskLocation], damaged: int = 0) -> None:
        """See ``TieredIndex.restored``."""
        with self._lock:
            self._index.restored(locations)
            self._index.disk.damaged += damaged

    def save_all(self) -> None:
        """Queue every full block in memory for writing."""
        with self._lock:
            self._index.save_all()
            self._write_wanted.notify()

    def unsaved(self) -> int:
        """The number of blocks yet to be written."""
        with self._lock:
            return self._index.unsaved()
