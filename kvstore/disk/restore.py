"""Restores what an earlier start left: segments at once, their blocks in the background.

Blocks are found by their headers, the most recently used segment first. A block that has not been
found yet is a miss, and is put again.
"""

from __future__ import annotations

import logging
import threading
import time
from itertools import islice

from kvstore.disk.directory import DiskDirectory
from kvstore.disk.locked_index import LockedIndex
from kvstore.disk.segment import SegmentScan

log = logging.getLogger("kvrelay.store")

CHUNK = 256
"""Blocks added to the index at a time."""

REPORT_SECONDS = 2.0
MIB = 1 << 20


class Restorer:
    """``start`` once; ``wait`` for the end; ``stop`` ends it early."""

    def __init__(self, disk_index: LockedIndex, directory: DiskDirectory) -> None:
        self._index = disk_index
        self._directory = directory
        self._sizes = dict(directory.segments())
        for segment, size in self._sizes.items():
            disk_index.open(segment, size)
        for segment in disk_index.make_room(0, None) or ():
            directory.remove(segment)
        self._stop = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disk-restore", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End with the blocks found so far."""
        self._stop.set()

    def wait(self, seconds: float) -> bool:
        """Wait for the end; returns whether it has come."""
        return self._done.wait(seconds)

    def _run(self) -> None:
        began = reported = time.monotonic()
        total = sum(self._sizes.values())
        scanned = blocks = damaged = 0
        for segment in reversed(self._sizes):
            if not self._index.holds(segment):
                continue  # dropped: there was no room for it
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
        self._done.set()

    def _scan(self, segment: int) -> tuple[int, int]:
        """The number of blocks found in a segment, and of damaged records."""
        scan = SegmentScan(self._directory.file(segment), segment)
        locations, found = scan.locations(), 0
        try:
            while not self._stop.is_set() and (chunk := list(islice(locations, CHUNK))):
                found += len(chunk)
                self._index.restored(chunk)
        except OSError as error:
            log.warning("disk: segment %d cannot be read: %s", segment, error.strerror)
            scan.damaged += 1
        self._index.restored((), scan.damaged)
        return found, scan.damaged
