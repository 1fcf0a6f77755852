"""What may happen to the files of the disk tier, and what the store makes of it."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvrelay.errors import Corrupt, Rejected
from kvstore import PutStatus
from kvstore.config import StoreConfig
from kvstore.disk import writer
from kvstore.disk.directory import DiskDirectory
from kvstore.disk.record import (
    HEAD_BYTES,
    RecordHead,
    decode_head,
    encode_head,
    padding,
    record_bytes,
)
from kvstore.disk.segment import SegmentScan
from tests.kvstore.disk.rig import files, inside, size_of, until
from tests.kvstore.rig import make, name_of


def test_a_record_is_read_as_it_was_written_and_no_flipped_byte_passes() -> None:
    head = RecordHead(b"t" * 16 + b"n" * 32, 12_345)
    data = encode_head(head)
    assert (len(data), decode_head(data)) == (HEAD_BYTES, head)
    for at in range(len(data)):
        with pytest.raises(Corrupt, match="record"):
            decode_head(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
    with pytest.raises(Corrupt, match="record"):
        decode_head(data[:-1])
    for size in (0, 1, 127, 128, 129, 5000):
        assert record_bytes(size) == HEAD_BYTES + size + len(padding(size))
        assert record_bytes(size) % HEAD_BYTES == 0


def test_truncated_and_flipped_files_are_misses_with_a_counter(tmp_path: Path) -> None:
    blocks = [make(20_000) for _ in range(20)]
    with inside(tmp_path) as store:
        store.fill(*blocks)
    (file,) = files(tmp_path)
    data = bytearray(file.read_bytes())
    record = len(data) // 20
    data[3 * record + 10_000] ^= 1  # a payload
    data[5 * record + HEAD_BYTES + 200] ^= 1  # a block's header
    file.write_bytes(data[: 15 * record + 5000])
    bad = {3, 5, *range(15, 20)}
    with inside(tmp_path, restore=True) as store:
        assert (store.disk.counters.restored, store.disk.counters.damaged) == (14, 2)
        assert store.right(*blocks) == [number not in bad for number in range(20)]
        assert store.disk.counters.corrupt == 1
        assert store.has(blocks[3]) == [False]
        store.fill(*(blocks[number] for number in bad))  # what was wrong can be put again
        assert all(store.right(*blocks))


def test_whatever_byte_flips_nothing_wrong_comes_back(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    source = random.Random(seed)
    blocks = [make(source.randrange(1, 3000), count=source.randrange(200)) for _ in range(30)]
    with inside(tmp_path) as store:
        store.fill(*blocks)
    (file,) = files(tmp_path)
    good = file.read_bytes()
    for _ in range(12):
        data = bytearray(good)
        for _ in range(source.randrange(1, 6)):
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
        for left in files(tmp_path):
            left.unlink()
        file.write_bytes(data[: source.choice([len(data), source.randrange(len(data))])])
        with inside(tmp_path, restore=True) as store:
            store.right(*blocks)  # each is right or absent


def test_a_lease_on_a_damaged_block_is_a_lease_on_the_others(tmp_path: Path) -> None:
    blocks = [make(20_000) for _ in range(6)]
    with inside(tmp_path) as store:
        store.fill(*blocks)
    (file,) = files(tmp_path)
    data = bytearray(file.read_bytes())
    data[2 * (len(data) // 6) + 9000] ^= 1
    file.write_bytes(data)
    with inside(tmp_path, restore=True) as store:
        found = store.block_store.lookup([name_of(block) for block in blocks], [], 60.0)
        assert found.lead == 6
        assert store.right(*blocks) == [True, True, False, True, True, True]
        assert found.lease is not None
        store.block_store.release([found.lease.id])
        stats = store.block_store.stats()
        assert (stats.leases, stats.leased_bytes) == (0, 0)


def test_a_store_whose_files_are_gone_goes_on(tmp_path: Path) -> None:
    blocks = [make(100_000) for _ in range(20)]
    with inside(tmp_path) as store:
        store.fill(*blocks)
        for file in files(tmp_path):
            file.unlink()
        there = store.right(*blocks)
        assert not all(there)
        again = [block for block, was in zip(blocks, there, strict=True) if not was]
        assert store.has(*again) == [False] * len(again)


def test_the_budget_is_kept_and_the_oldest_go(tmp_path: Path) -> None:
    blocks = [make(30_000) for _ in range(150)]
    with inside(tmp_path, disk_budget=2 << 20) as store:
        for block in blocks:
            store.fill(block)
            assert size_of(tmp_path) <= 2 << 20
        assert store.disk.bytes == size_of(tmp_path)
        assert store.disk.counters.dropped > 0
        there = store.has(*blocks)
        assert not any(there[:20])
        assert all(there[-30:])
        assert store.put(make(1 << 19)) is PutStatus.STORED  # large beside the segments
        store.finish_write()
        assert size_of(tmp_path) <= 2 << 20
    with inside(tmp_path, disk_budget=1 << 20, restore=True) as store:  # less than before
        assert store.disk.bytes == size_of(tmp_path) <= 1 << 20
        assert all(store.right(*blocks[-8:]))


def test_what_was_used_last_is_kept_across_restarts(tmp_path: Path) -> None:
    blocks = [make(60_000) for _ in range(30)]
    with inside(tmp_path, disk_budget=2 << 20) as store:
        store.fill(*blocks)
    assert len(files(tmp_path)) > 4
    with inside(tmp_path, disk_budget=2 << 20, restore=True) as store:
        assert store.right(blocks[0]) == [True]
    with inside(tmp_path, disk_budget=1 << 20, restore=True) as store:
        assert store.right(blocks[0], blocks[4]) == [True, False]


def test_a_full_disk_is_a_counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses what is more than a quota, as a full file system does: some of it."""
    quota, true = 600_000, os.pwritev

    def pwritev(fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        if (left := quota - size_of(tmp_path)) <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        wrote = 0
        for buffer in buffers:
            wrote += true(fd, [memoryview(buffer)[: left - wrote]], offset + wrote)
            if wrote == left:
                break
        return wrote

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(writer, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(writer, "LONGEST_PAUSE", 0.01)
    blocks = [make(30_000) for _ in range(60)]
    with inside(tmp_path, budget=200_000, disk_budget=2 << 20) as store:
        for block in blocks:
            assert store.put(block) is PutStatus.STORED
            store.finish_write()
            assert size_of(tmp_path) <= quota
        assert store.disk.counters.failed > 0
        assert store.disk.counters.dropped > 0
        there = store.right(*blocks)
        assert all(there[-10:])
        assert not all(there)
        quota = 10 << 20
        store.fill(*(make(30_000) for _ in range(30)))
        assert size_of(tmp_path) > 600_000
    with inside(tmp_path, restore=True) as store:
        assert store.disk.counters.damaged == 0


def test_other_failures_of_the_disk_remove_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = os.pwritev
    monkeypatch.setattr(writer, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(writer, "LONGEST_PAUSE", 0.01)
    blocks = [make(30_000) for _ in range(10)]
    with inside(tmp_path) as store:
        store.fill(*blocks[:9])

        def broken(*_: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "pwritev", broken)
        store.put(blocks[9])
        until(lambda: store.disk.counters.failed > 2)
        assert (store.disk.counters.dropped, store.disk.unsaved) == (0, 1)
        monkeypatch.setattr(os, "pwritev", true)
        store.finish_write()
        assert all(store.right(*blocks))


def test_a_block_too_large_for_the_disk_stays_in_memory(tmp_path: Path) -> None:
    with inside(tmp_path, budget=4 << 20, disk_budget=1 << 20) as store:
        large, small = make(600_000), make(100)
        store.fill(large, small)
        assert store.disk.counters.skipped == 1
        assert (store.disk.entries, store.right(large)) == (1, [True])


def test_a_block_of_more_than_half_of_the_memory_comes_back(tmp_path: Path) -> None:
    with inside(tmp_path, budget=1 << 20) as store:
        large = make(600_000)
        store.fill(large, *(make(100_000) for _ in range(9)))
        assert store.block_store.inspect(name_of(large)) is not None
        assert store.block_store.locate([name_of(large)], 0.0).lease is None  # not in memory
        assert store.right(large) == [True]


def test_a_file_that_cannot_be_made_leaves_nothing_in_the_books(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(writer, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(writer, "LONGEST_PAUSE", 0.01)
    with inside(tmp_path) as store, monkeypatch.context() as context:
        context.setattr(writer, "SegmentAppender", refused)
        store.put(make(30_000))
        until(lambda: store.disk.counters.failed > 4)
        assert store.block_store.disk_index is not None
        with store.block_store.disk_index.locked() as index:
            assert len(index.segments.by_age()) <= 1  # that of the try under way
        context.undo()
        store.finish_write()


def test_what_is_no_file_is_no_segment(tmp_path: Path) -> None:
    """A pipe that was opened to be looked through would stop it for good."""
    block = make(1000)
    with inside(tmp_path) as store:
        store.fill(block)
    os.mkfifo(tmp_path / f"segment-{7:016x}")
    (tmp_path / f"segment-{8:016x}").mkdir()
    (tmp_path / f"segment-{9:016x}").symlink_to("/dev/zero")
    with inside(tmp_path, restore=True) as store:
        assert store.right(block) == [True]
        assert store.disk.counters.damaged == 0


def test_a_segment_that_is_removed_while_they_are_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``clear`` failed when the writer dropped a segment at that moment."""
    directory, true = DiskDirectory(str(tmp_path)), os.scandir
    for number in (1, 2):
        directory.file(number).write_bytes(bytes(number))

    def scandir(path: Path) -> list[os.DirEntry[str]]:
        entries = list(true(path))
        directory.remove(1)
        return entries

    monkeypatch.setattr(os, "scandir", scandir)
    assert directory.segments() == [(2, 2)]
    directory.close()


def test_a_start_that_ended_early_leaves_a_directory_that_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "FORMAT.new").touch()
    DiskDirectory(str(tmp_path)).close()
    DiskDirectory(str(tmp_path)).close()


def test_a_directory_is_one_stores_and_of_one_format(tmp_path: Path) -> None:
    ours, foreign, old = tmp_path / "a" / "b", tmp_path / "foreign", tmp_path / "old"
    first = DiskDirectory(str(ours))
    with pytest.raises(Rejected, match="in use by another store"):
        DiskDirectory(str(ours))
    first.close()
    DiskDirectory(str(ours)).close()
    foreign.mkdir()
    (foreign / "letter").write_text("dear")
    with pytest.raises(Rejected, match="holds other files"):
        DiskDirectory(str(foreign))
    assert [file.name for file in foreign.iterdir()] == ["letter"]
    old.mkdir()
    (old / "FORMAT").write_text("kvrelay store, disk format 0, header format 1\n")
    with pytest.raises(Rejected, match="disk format 0"):
        DiskDirectory(str(old))
    with pytest.raises(Rejected, match="cannot be used"):
        DiskDirectory("/proc/none")


def test_a_scan_ends_at_the_first_head_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(os.urandom(5000))
    scan = SegmentScan(path, 1)
    assert list(scan.locations()) == []
    assert scan.damaged == 1


def test_a_disk_that_is_not_named_is_refused() -> None:
    with pytest.raises(Rejected, match="disk: is empty"):
        StoreConfig(disk="")
    with pytest.raises(Rejected, match="restore: nothing can be restored without --disk"):
        StoreConfig(restore=True)
