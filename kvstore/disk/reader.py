"""The threads that load blocks from disk: read into place, verified, and only then ready."""

from __future__ import annotations

import logging
import threading
import time

from kvrelay.errors import Corrupt
from kvstore.claims import Claim, check_block
from kvstore.disk.directory import DiskDirectory
from kvstore.disk.locked_index import LockedIndex, ReadJob
from kvstore.disk.segment import read_into
from kvstore.server.arena import Arena

log = logging.getLogger("kvrelay.store")

THREADS = 2
IDLE_SECONDS = 0.5
USED_SECONDS = 60.0
"""The precision of a segment's last use that later starts see."""


class BlockReaders:
    """``start`` once; ``stop`` and ``join`` at the end."""

    def __init__(self, disk_index: LockedIndex, directory: DiskDirectory, arena: Arena) -> None:
        self._index = disk_index
        self._directory = directory
        self._arena = arena
        self._used: dict[int, float] = {}
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name="disk-read", daemon=True)
            for _ in range(THREADS)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End after the current reads."""
        self._stop.set()

    def join(self, seconds: float) -> None:
        """Wait until the threads have ended."""
        for thread in self._threads:
            thread.join(seconds)

    def _run(self) -> None:
        while not self._stop.is_set():
            job = self._index.next_read(IDLE_SECONDS)
            if job is not None and not self._index.finish_read(job, self._read(job)):
                self._directory.remove(job.location.segment)  # the store was cleared meanwhile

    def _read(self, job: ReadJob) -> bool:
        entry, location = job.entry, job.location
        view = self._arena.view(entry.value, entry.size)
        try:
            read_into(self._directory.file(location.segment), location.offset, view)
            check_block(Claim(entry.name, entry.size, partial=False), view)
        except Corrupt as error:
            log.warning(
                "disk: block %s in segment %d: %s", entry.name.hex(), location.segment, error
            )
            return False
        now = time.monotonic()
        if now - self._used.get(location.segment, -USED_SECONDS) >= USED_SECONDS:
            self._used = {s: at for s, at in self._used.items() if now - at < USED_SECONDS}
            self._used[location.segment] = now
            self._directory.used(location.segment)
        return True
