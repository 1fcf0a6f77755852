"""The write-behind thread: blocks in memory go to disk in long writes, oldest first.

No request waits for it. A block that it cannot write in time is dropped when memory is short, and
counted.
"""

from __future__ import annotations

import errno
import logging

from kvstore.disk.directory import DiskDirectory
from kvstore.disk.locked_index import LockedIndex
from kvstore.disk.record import record_bytes
from kvstore.disk.segment import SegmentAppender
from kvstore.disk.threads import StoppableThread
from kvstore.index.entries import IndexEntry
from kvstore.server.arena import Arena

log = logging.getLogger("kvrelay.store")

BATCH_BYTES = 8 << 20
SEGMENT_BYTES = 64 << 20
SEGMENTS = 16
"""The budget is divided into at least this many segments."""

IDLE_SECONDS = 0.5
BUSY_SECONDS = 0.02  # until a read of the segment has ended
FULL = (errno.ENOSPC, errno.EDQUOT)
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
"""Seconds of pause after the system refused a write."""


class SegmentWriter(StoppableThread):
    """Writes until it is stopped. Segments are numbered from ``first`` on."""

    def __init__(
        self,
        disk_index: LockedIndex,
        directory: DiskDirectory,
        arena: Arena,
        budget: int,
        first: int,
    ) -> None:
        super().__init__("disk-write")
        self._index = disk_index
        self._directory = directory
        self._arena = arena
        self._segment_bytes = max(1, min(SEGMENT_BYTES, budget // SEGMENTS))
        self._batch = min(BATCH_BYTES, self._segment_bytes, arena.size // 8)
        self._next = first
        self._current: SegmentAppender | None = None
        self._pause = 0.0

    def run(self) -> None:
        while not self.stopping.is_set():
            batch = self._index.next_writes(self._batch, IDLE_SECONDS)
            if batch and not self._write(batch):
                self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
                self.stopping.wait(self._pause)
        self._retire()

    def _write(self, batch: list[IndexEntry[int]]) -> bool:
        """Write a batch; returns whether the system accepted it."""
        try:
            segment = self._segment(sum(record_bytes(entry.size) for entry in batch))
            if segment is None:
                with self._index.locked() as index:
                    index.abandon_write(batch)
                self.stopping.wait(BUSY_SECONDS)
                return True
            views = [self._arena.view(entry.value, entry.size) for entry in batch]
            offsets = segment.append([(e.name, v) for e, v in zip(batch, views, strict=True)])
        except OSError as error:
            self._refused(batch, error)
            return False
        self._pause = 0.0
        with self._index.locked() as index:
            index.finish_write(segment.number, segment.end, batch, offsets)
        if segment.end >= self._segment_bytes:
            self._retire()
        return True

    def _segment(self, nbytes: int) -> SegmentAppender | None:
        """A segment with room for ``nbytes``; drops old ones. ``None`` if all are being read."""
        if self._current is not None:
            with self._index.locked() as index:
                cleared = not index.segments.holds(self._current.number)
            if cleared:
                self._retire()
        while dropped := self._make_room(nbytes):
            for segment in dropped:
                self._directory.remove(segment)
        if dropped is None:
            if self._current is None:
                return None
            self._retire()
            return self._segment(nbytes)
        if self._current is None:
            number = self._next
            self._next = self._next + 1
            with self._index.locked() as index:
                index.segments.open(number, 0)
            try:
                self._current = SegmentAppender(self._directory.file(number), number)
            except OSError:
                self._drop(number)
                raise
        return self._current

    def _make_room(self, nbytes: int) -> list[int] | None:
        spared = None if self._current is None else self._current.number
        with self._index.locked() as index:
            return index.make_room_on_disk(nbytes, spared)

    def _refused(self, batch: list[IndexEntry[int]], error: OSError) -> None:
        """Handle a refused write. On a full disk the oldest segment is dropped, to retry later."""
        with self._index.locked() as index:
            index.abandon_write(batch, failed=True)
            oldest = index.segments.victim(None)
        if not self._pause:
            log.warning("disk: %d blocks could not be written: %s", len(batch), error.strerror)
        self._retire()
        if error.errno in FULL and oldest is not None:
            self._drop(oldest)

    def _retire(self) -> None:
        """Close the current segment."""
        current = self._current
        self._current = None
        if current is not None:
            current.close()
            if not current.end:
                self._drop(current.number)

    def _drop(self, segment: int) -> None:
        with self._index.locked() as index:
            index.drop_segment(segment)
        self._directory.remove(segment)
