"""The tiered index for the threads of the disk tier: each step under the store's lock, no I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

    @contextmanager
    def locked(self) -> Iterator[TieredIndex]:
        """The index, for one step; reads and writes that the step queued start after it."""
        with self._lock:
            yield self._index
            self.wake()

    def wake(self) -> None:
        """Wake the readers and the writer; call it under the lock."""
        self._write_wanted.notify()
        self._read_wanted.notify_all()

    def load(self, names: Sequence[bytes]) -> bool:
        """See ``TieredIndex.load``."""
        with self.locked() as index:
            return index.load(names, time.monotonic())

    def is_loading(self, names: Sequence[bytes]) -> bool:
        """See ``TieredIndex.is_loading``."""
        with self._lock:
            return self._index.is_loading(names)

    def wait_for(self, names: Sequence[bytes], seconds: float) -> None:
        """Return when none of ``names`` is being loaded, or after ``seconds``."""
        with self._lock:
            self._read_finished.wait_for(lambda: not self._index.is_loading(names), seconds)

    def location(self, name: bytes) -> DiskLocation | None:
        """The block's location on disk."""
        return self._index.segments.find(name)

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
