"""The index as the threads of the disk tier use it: each step under the store's lock, no I/O."""

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
    """Thread-safe. ``told`` is called, in any thread, when blocks have come up or will not."""

    def __init__(self, index: TieredIndex, lock: threading.Lock, told: Callable[[], None]) -> None:
        self._index = index
        self._lock = lock
        self._told = told
        self._loaded = threading.Condition(lock)
        self._reads = threading.Condition(lock)
        self._write_queue = threading.Condition(lock)

    def wake(self) -> None:
        """There may be something to write or read; call it under the lock."""
        self._write_queue.notify()
        self._reads.notify_all()

    def load(self, names: Sequence[bytes]) -> bool:
        """See the index."""
        with self._lock:
            coming = self._index.load(names, time.monotonic())
            self._reads.notify_all()
            return coming

    def is_loading(self, names: Sequence[bytes]) -> bool:
        """Likewise."""
        with self._lock:
            return self._index.is_loading(names)

    def has(self, name: bytes) -> bool:
        """Whether it lies on disk."""
        return name in self._index.segments

    def location(self, name: bytes) -> DiskLocation | None:
        """Where it lies there."""
        return self._index.segments.find(name)

    def wait_for(self, names: Sequence[bytes], seconds: float) -> None:
        """Until none of ``names`` is on its way, at most so long."""
        with self._lock:
            self._loaded.wait_for(lambda: not self._index.is_loading(names), seconds)

    def next_read(self, seconds: float) -> ReadJob | None:
        """What to read next; ``None`` if nothing is for so long."""
        with self._lock:
            wanted = self._index.next_read()
            if wanted is None:
                self._reads.wait(seconds)
                wanted = self._index.next_read()
        return None if wanted is None else ReadJob(*wanted)

    def finish_read(self, job: ReadJob, good: bool) -> bool:
        """See the index. Whether the segment's file is still needed."""
        with self._lock:
            self._index.finish_read(job.entry, job.location, good)
            self._loaded.notify_all()
            needed = self._index.segments.needs(job.location.segment)
        self._told()
        return needed

    def take(self, limit: int, seconds: float) -> list[IndexEntry[int]]:
        """What to write next; empty if nothing is for so long."""
        with self._lock:
            batch = self._index.take_write_queue(limit)
            if not batch:
                self._write_queue.wait(seconds)
                batch = self._index.take_write_queue(limit)
            return batch

    def finish_write(
        self, segment: int, nbytes: int, batch: Sequence[IndexEntry[int]], offsets: Sequence[int]
    ) -> None:
        """See the index."""
        with self._lock:
            self._index.finish_write(segment, nbytes, batch, offsets)

    def abandon_write(self, batch: Sequence[IndexEntry[int]], failed: bool) -> None:
        """Likewise."""
        with self._lock:
            self._index.disk.failed += len(batch) if failed else 0
            self._index.abandon_write(batch)

    def make_room(self, nbytes: int, spared: int | None) -> list[int] | None:
        """Likewise."""
        with self._lock:
            return self._index.make_room_below(nbytes, spared)

    def oldest(self) -> int | None:
        """The segment that is to go first."""
        with self._lock:
            return self._index.segments.victim(None)

    def drop(self, segment: int) -> None:
        """Forget a segment."""
        with self._lock:
            if self._index.segments.holds(segment):
                self._index.drop_segment(segment)

    def open(self, segment: int, nbytes: int) -> None:
        """A file that there is from now on."""
        with self._lock:
            self._index.segments.open(segment, nbytes)

    def holds(self, segment: int) -> bool:
        """Whether a segment counts still."""
        with self._lock:
            return self._index.segments.holds(segment)

    def needs(self, segment: int) -> bool:
        """Whether its file must stay."""
        with self._lock:
            return self._index.segments.needs(segment)

    def segments(self) -> list[int]:
        """The one to go first first."""
        with self._lock:
            return self._index.segments.by_age()

    def restored(self, locations: Sequence[DiskLocation], damaged: int = 0) -> None:
        """See the index."""
        with self._lock:
            self._index.restored(locations)
            self._index.disk.damaged += damaged

    def save_all(self) -> None:
        """Have everything written."""
        with self._lock:
            self._index.save_all()
            self._write_queue.notify()

    def unsaved(self) -> int:
        """Blocks yet to be written."""
        with self._lock:
            return self._index.unsaved()
