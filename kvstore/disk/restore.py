"""What an earlier start left: segments are found at once, their blocks by their headers, behind.

The most recently used segment comes first. What is not found yet is a miss, and is put again.
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
"""Blocks told at a time."""

REPORT_SECONDS = 2.0
MIB = 1 << 20


class Restorer:
    """``start`` it once; ``wait`` for its end as long as seems right; ``stop`` ends it early."""

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
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End with what has been found."""
        self._stop.set()

    def wait(self, seconds: float) -> bool:
        """Whether the end has come by then."""
        return self._done.wait(seconds)

    def _run(self) -> None:
        began = reported = time.monotonic()
        total = sum(self._sizes.values())
        past = blocks = damaged = 0
        for segment in reversed(self._sizes):
            if not self._index.holds(segment):
                continue  # there was no room for it
            found, wrong = self._scan(segment)
            blocks, damaged, past = blocks + found, damaged + wrong, past + self._sizes[segment]
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                log.info(
                    "disk: %d %% of %.0f MiB looked through",
                    100 * past / max(total, 1),
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
        """How many blocks were found in it, and how many records are no blocks."""
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
