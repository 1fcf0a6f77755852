"""The threads that load blocks from disk: read into place, verified, and only then ready."""

from __future__ import annotations

import logging
import time

from kvrelay.errors import Corrupt
from kvstore.claims import Claim, check_block
from kvstore.disk.directory import DiskDirectory
from kvstore.disk.locked_index import LockedIndex, ReadJob
from kvstore.disk.segment import read_into
from kvstore.disk.threads import StoppableThread
from kvstore.server.arena import Arena

log = logging.getLogger("kvrelay.store")

IDLE_SECONDS = 0.5
USED_SECONDS = 60.0
"""The precision of a segment's last use that later starts see."""


class BlockReader(StoppableThread):
    """Reads until it is stopped."""

    def __init__(self, disk_index: LockedIndex, directory: DiskDirectory, arena: Arena) -> None:
        super().__init__("disk-read")
        self._index = disk_index
        self._directory = directory
        self._arena = arena
        self._used: dict[int, float] = {}

    def run(self) -> None:
        while not self.stopping.is_set():
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
