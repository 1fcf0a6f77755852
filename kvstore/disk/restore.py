"""Restores what an earlier start left: segments at once, their blocks in the background.

Blocks are found by their headers, the most recently used segment first. A block that has not been
found yet is a miss, and is put again.
"""

from __future__ import annotations

import logging
import time
from itertools import islice

from kvstore.disk.directory import DiskDirectory
from kvstore.disk.locked_index import LockedIndex
from kvstore.disk.segment import SegmentScan
from kvstore.disk.threads import StoppableThread

log = logging.getLogger("kvrelay.store")

CHUNK = 256
"""Blocks added to the index at a time."""

REPORT_SECONDS = 2.0
MIB = 1 << 20


class Restorer(StoppableThread):
    """Ends when every segment was scanned; if it is stopped, with the blocks found so far."""

    def __init__(self, disk_index: LockedIndex, directory: DiskDirectory) -> None:
        super().__init__("disk-restore")
        self._index = disk_index
        self._directory = directory
        self._sizes = dict(directory.segments())
        with disk_index.locked() as index:
            for segment, size in self._sizes.items():
                index.segments.open(segment, size)
            too_many = index.make_room_on_disk(0, None)
        for segment in too_many or ():
            directory.remove(segment)

    def run(self) -> None:
        began = reported = time.monotonic()
        total = sum(self._sizes.values())
        scanned = blocks = damaged = 0
        for segment in reversed(self._sizes):
            with self._index.locked() as index:
                dropped = not index.segments.holds(segment)
            if dropped:
                continue  # there was no room for it
            found, wrong = self._scan(segment)
            blocks += found
            damaged += wrong
            scanned += self._sizes[segment]
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                log.info(
                    "disk: %d %% of %.0f MiB scanned",
                    100 * scanned / max(total, 1),
                    total / MIB,
                )
        log.info(
            "disk: %d blocks in %.0f MiB found in %.1f s, %d records damaged",
            blocks,
            total / MIB,
            time.monotonic() - began,
            damaged,
        )

    def _scan(self, segment: int) -> tuple[int, int]:
        """The number of blocks found in a segment, and of damaged records."""
        scan = SegmentScan(self._directory.file(segment), segment)
        locations, found = scan.locations(), 0
        try:
            while not self.stopping.is_set() and (chunk := list(islice(locations, CHUNK))):
                found += len(chunk)
                with self._index.locked() as index:
                    index.restored(chunk)
        except OSError as error:
            log.warning("disk: segment %d cannot be read: %s", segment, error.strerror)
            scan.damaged += 1
        with self._index.locked() as index:
            index.restored((), scan.damaged)
        return found, scan.damaged
