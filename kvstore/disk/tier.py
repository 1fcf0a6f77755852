"""The disk tier: a directory with its writer, its readers and the restore of earlier blocks."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from kvrelay.block.header import decode, header_bytes
from kvrelay.errors import Corrupt
from kvstore.disk.directory import DiskDirectory
from kvstore.disk.locked_index import LockedIndex
from kvstore.disk.reader import BlockReaders
from kvstore.disk.restore import Restorer
from kvstore.disk.segment import read_into
from kvstore.disk.writer import SegmentWriter
from kvstore.server.arena import Arena

log = logging.getLogger("kvrelay.store")

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
        self._readers = BlockReaders(disk_index, self._directory, arena)

    def start(self) -> None:
        """Start to write, read and restore."""
        self._restorer.start()
        self._writer.start()
        self._readers.start()

    def wait_restored(self, seconds: float) -> bool:
        """Wait until all blocks of earlier starts are known; returns whether they are."""
        return self._restorer.wait(seconds)

    def flush(self, seconds: float) -> bool:
        """Write all full blocks in memory; returns whether all were written in time."""
        self._index.save_all()
        deadline = time.monotonic() + seconds
        while (left := self._index.unsaved()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if left:
            log.warning("disk: %d blocks were not written in %.1f s", left, seconds)
        return not left

    def header(self, name: bytes) -> bytes:
        """The bytes of a block's header; empty if it cannot be read."""
        if (location := self._index.location(name)) is None:
            return b""
        data = bytearray(header_bytes(location.tokens))
        try:
            read_into(self._directory.file(location.segment), location.offset, memoryview(data))
            decode(data)
        except Corrupt as error:
            log.warning("disk: block %s in segment %d: %s", name.hex(), location.segment, error)
            return b""
        return bytes(data)

    def sweep(self) -> None:
        """Remove the files of segments that are no longer needed."""
        for segment, _ in self._directory.segments():
            if not self._index.needs(segment):
                self._directory.remove(segment)

    def close(self) -> None:
        """Stop every thread and unlock the directory."""
        for part in (self._restorer, self._writer, self._readers):
            part.stop()
        self._writer.join(JOIN_SECONDS)
        self._readers.join(JOIN_SECONDS)
        for segment in self._index.segments():
            self._directory.used(segment)  # in the order of their use
        self._directory.close()

    def _forget(self, old: list[tuple[int, int]]) -> None:
        if old:
            size = sum(size for _, size in old) / (1 << 20)
            log.warning("disk: removing %.0f MiB of earlier blocks; --restore keeps them", size)
        for segment, _ in old:
            self._directory.remove(segment)
