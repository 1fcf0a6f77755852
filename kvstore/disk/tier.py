"""The disk tier: a directory with its writer, its readers and the restore of earlier blocks."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from kvrelay.block.header import MAX_HEADS, decode, header_bytes
from kvrelay.errors import Corrupt
from kvstore.disk.directory import DiskDirectory
from kvstore.disk.locked_index import LockedIndex
from kvstore.disk.reader import BlockReader
from kvstore.disk.restore import Restorer
from kvstore.disk.segment import read_into
from kvstore.disk.threads import StoppableThread
from kvstore.disk.writer import SegmentWriter
from kvstore.server.arena import Arena

log = logging.getLogger("kvrelay.store")

READERS = 2
JOIN_SECONDS = 5.0
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """``restore``: start with the blocks in the directory; else they are removed."""

    path: str
    budget: int
    restore: bool = False


class DiskTier:
    """Locks the directory when made; ``Rejected`` if it cannot. ``start``, then ``close``."""

    def __init__(self, options: DiskOptions, disk_index: LockedIndex, arena: Arena) -> None:
        self._index = disk_index
        self._directory = DiskDirectory(options.path)
        old = self._directory.segments()
        first = max((segment for segment, _ in old), default=0) + 1
        if not options.restore:
            self._forget(old)
        self._restorer = Restorer(disk_index, self._directory)
        self._writer = SegmentWriter(disk_index, self._directory, arena, options.budget, first)
        readers = [BlockReader(disk_index, self._directory, arena) for _ in range(READERS)]
        self._threads: tuple[StoppableThread, ...] = (self._restorer, self._writer, *readers)

    def start(self) -> None:
        """Start to write, read and restore."""
        for thread in self._threads:
            thread.start()

    def wait_restored(self, seconds: float) -> bool:
        """Wait until all blocks of earlier starts are known; returns whether they are."""
        self._restorer.join(seconds)
        return not self._restorer.is_alive()

    def flush(self, seconds: float) -> bool:
        """Write all full blocks in memory; returns whether all were written in time."""
        with self._index.locked() as index:
            index.save_all()
        deadline = time.monotonic() + seconds
        while (left := self._unsaved()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if left:
            log.warning("disk: %d blocks were not written in %.1f s", left, seconds)
        return not left

    def header(self, name: bytes) -> bytes:
        """The bytes of a block's header; empty if it cannot be read."""
        if (location := self._index.location(name)) is None:
            return b""
        longest = header_bytes(location.tokens, MAX_HEADS)
        data = bytearray(min(longest, location.size))
        try:
            read_into(self._directory.file(location.segment), location.offset, memoryview(data))
            length = decode(data).length
        except Corrupt as error:
            log.warning("disk: block %s in segment %d: %s", name.hex(), location.segment, error)
            return b""
        return bytes(data[:length])

    def sweep(self) -> None:
        """Remove the files of segments that are no longer needed."""
        for segment, _ in self._directory.segments():
            with self._index.locked() as index:
                needed = index.segments.needs(segment)
            if not needed:
                self._directory.remove(segment)

    def close(self) -> None:
        """Stop every thread and unlock the directory."""
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
        with self._index.locked() as index:
            by_age = index.segments.by_age()
        for segment in by_age:
            self._directory.used(segment)
        self._directory.close()

    def _unsaved(self) -> int:
        with self._index.locked() as index:
            return index.unsaved()

    def _forget(self, old: list[tuple[int, int]]) -> None:
        if old:
            size = sum(size for _, size in old) / (1 << 20)
            log.warning("disk: removing %.0f MiB of earlier blocks; --restore keeps them", size)
        for segment, _ in old:
            self._directory.remove(segment)
