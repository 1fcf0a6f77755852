"""``python -m benchmarks.store.disk``: how fast blocks go to disk, come back, and are found again.

In one process, without gRPC: what the disk tier adds, against plain files of the same bytes.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvrelay.block.header import Header, checksum, encode
from kvrelay.block.name import child_name
from kvrelay.config.reader import load, option
from kvrelay.errors import Corrupt
from kvstore.base import PutStatus
from kvstore.claims import Claim
from kvstore.disk.tier import DiskOptions, DiskTier
from kvstore.limits import StoreLimits
from kvstore.server.block_store import BlockStore

SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
TOKENS = tuple(range(16))
SPACE = b"bench".ljust(32, b"\0")
SECONDS = 300.0
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskBenchConfig:
    """What is measured, and where."""

    directory: str | None = option(None, "on which disk; default: a temporary one", metavar="DIR")
    bytes: int = option(1 << 30, "written and read for each size", unit="bytes", low=1 << 24)
    sizes: tuple[int, ...] = option(SIZES, "bytes of a block's payload; may be repeated")
    json: bool = option(False, "print JSON instead of a table")


@dataclass(frozen=True, slots=True)
class DiskRow:
    """GB/s, but for ``restore``: blocks found per second. Reads come from the disk itself."""

    size: int
    put: float  # into memory, with the disk behind
    saved: float  # until all is on disk
    plain_write: float
    back: float  # read into memory, checked
    plain_read: float
    restore: float


class DiskBench:
    """One size of block."""

    def __init__(self, size: int, total: int, path: Path) -> None:
        self._payload = np.random.default_rng(7).integers(0, 256, size, np.uint8).tobytes()
        self._count = total // size
        self._path = path
        self._parents = (n.to_bytes(32, "little") for n in itertools.count(1))
        self._blocks = [self._block() for _ in range(self._count)]
        self._bytes = self._count * size
        self._budget = 2 * self._bytes + (64 << 20)

    def run(self) -> DiskRow:
        """Everything, once."""
        plain_write, plain_read = self._plain()
        with self._store(restore=False) as (block_store, tier):
            began = time.perf_counter()
            for name, header in self._blocks:
                self._put(block_store, name, header)
            put = time.perf_counter() - began
            tier.flush(SECONDS)
            saved = time.perf_counter() - began
        self._forget_pages()
        began = time.perf_counter()
        with self._store(restore=True) as (block_store, _):
            restore = time.perf_counter() - began
            back = self._load(block_store)
        rate = self._bytes / GB
        return DiskRow(
            len(self._payload),
            rate / put,
            rate / saved,
            rate / plain_write,
            rate / back,
            rate / plain_read,
            self._count / restore,
        )

    def _block(self) -> tuple[bytes, bytes]:
        parent, size = next(self._parents), len(self._payload)
        name = child_name(SPACE, parent, TOKENS)
        sums = (checksum(self._payload),)
        header = Header(SPACE, parent, name, TOKENS, "uint8", (1, size), size, sums)
        return name, encode(header)

    @contextmanager
    def _store(self, restore: bool) -> Iterator[tuple[BlockStore, DiskTier]]:
        block_store = BlockStore(StoreLimits(self._budget, disk_budget=2 * self._budget))
        if block_store.disk_index is None:
            raise Corrupt("block_store", "has no disk")
        options = DiskOptions(str(self._path / "store"), 2 * self._budget, restore)
        tier = DiskTier(options, block_store.disk_index, block_store.arena)
        tier.start()
        try:
            tier.wait_restored(SECONDS)
            yield block_store, tier
        finally:
            tier.close()

    def _put(self, block_store: BlockStore, name: bytes, header: bytes) -> None:
        size = len(header) + len(self._payload)
        grant = block_store.reserve([Claim(name, size, partial=False)])
        slots = [] if grant.ticket is None else block_store.slots(grant.ticket, [name])
        for slot in filter(None, slots):
            slot.buffer[: len(header)] = header
            slot.buffer[len(header) :] = self._payload
            slot.check()
        if [outcome.status for outcome in block_store.settle(slots)] != [PutStatus.STORED]:
            raise Corrupt("put", "was not stored")

    def _load(self, block_store: BlockStore) -> float:
        """Seconds until all are in memory, some asked for at a time."""
        names, disk_index = [name for name, _ in self._blocks], block_store.disk_index
        began = time.perf_counter()
        for start in range(0, len(names), 64):
            some = names[start : start + 64]
            if disk_index is not None and disk_index.load(some):
                disk_index.wait_for(some, SECONDS)
            found = block_store.locate(some, SECONDS)
            if None in found.blocks or found.lease is None:
                raise Corrupt("get", "a block did not come back")
            block_store.release([found.lease.id])
        return time.perf_counter() - began

    def _plain(self) -> tuple[float, float]:
        """Seconds to write the same bytes into one file, and to read them from disk."""
        file, buffer = self._path / "plain", bytearray(len(self._payload))
        began = time.perf_counter()
        with file.open("wb", buffering=0) as sink:
            for _ in range(self._count):
                sink.write(self._payload)
        wrote = time.perf_counter() - began
        _forget(file)
        began = time.perf_counter()
        with file.open("rb", buffering=0) as source:
            for _ in range(self._count):
                source.readinto(buffer)
        read = time.perf_counter() - began
        file.unlink()
        return wrote, read

    def _forget_pages(self) -> None:
        for file in (self._path / "store").iterdir():
            _forget(file)


def _forget(file: Path) -> None:
    """Let the system drop what it has of a file in memory."""
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def table(rows: list[DiskRow]) -> str:
    """For people."""
    lines = [f"{'block':>8} {'put':>7} {'saved':>7} {'plain':>7} {'back':>7} {'plain':>7}  restore"]
    for row in rows:
        rates = (row.put, row.saved, row.plain_write, row.back, row.plain_read)
        shown = " ".join(f"{rate:7.2f}" for rate in rates)
        lines.append(f"{row.size >> 10:>5}KiB {shown}  {row.restore:,.0f} blocks/s")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Measure and print."""
    config = load(
        DiskBenchConfig, argv, "python -m benchmarks.store.disk", "Speed of the store's disk tier."
    )
    rows = []
    for size in config.sizes:
        with tempfile.TemporaryDirectory(dir=config.directory) as folder:
            rows.append(DiskBench(size, config.bytes, Path(folder)).run())
    print(json.dumps([asdict(row) for row in rows]) if config.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
