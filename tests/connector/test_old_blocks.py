"""Blocks that a version with another format stored are misses with a reason, and no errors."""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import xxhash

from kvrelay.block import Namer
from kvrelay.block.header import VERSION
from kvrelay.engine.core.external import Loaded, Saved
from kvrelay.errors import Corrupt, Rejected
from kvrelay.usage import Miss
from kvstore import Block, Offer, PutStatus, connect
from kvstore.base import NameQuery
from kvstore.client.browse import browse
from kvstore.client.memory import forget
from kvstore.client.verify import verify_blocks
from kvstore.disk.directory import FORMAT, DiskDirectory
from kvstore.disk.segment import SegmentAppender, SegmentScan
from tests.connector.rig import PATIENT, SPACE, B, Worker, blocks_for, kv
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.disk.rig import files, inside
from tests.kvstore.redis.redisserver import Server, running
from tests.kvstore.rig import make, name_of

OLD_SPACE = dataclasses.replace(SPACE, format_version=2)
TOKENS = tuple(range(100, 100 + 3 * B))
TIMEOUT = 20.0
NUMBERS = itertools.count()
_FIXED = struct.Struct("<8sHBBIQQ16sII16s32s32s32s6I")


def old_block(name: bytes, parent: bytes, tokens: Sequence[int], payload: bytes) -> bytes:
    """A block as format 2 had it: one checksum, and the heads of a position side by side."""
    length = -(-(_FIXED.size + 4 * len(tokens)) // 128) * 128
    data = bytearray(length)
    _FIXED.pack_into(
        data,
        0,
        b"KVRBLOCK",
        2,
        5,
        0,
        length,
        0,
        xxhash.xxh3_64_intdigest(payload),
        b"",
        len(payload),
        len(tokens),
        b"float32",
        OLD_SPACE.digest,
        parent,
        name,
        *(2, 2, len(tokens), 1, 2, 0),
    )
    struct.pack_into(f"<{len(tokens)}I", data, _FIXED.size, *tokens)
    own = xxhash.xxh3_64_intdigest(bytes(data[:16] + data[24:]))
    data[16:24] = own.to_bytes(8, "little")
    return bytes(data) + payload


def old_chain() -> dict[bytes, bytes]:
    """The blocks of ``TOKENS`` as a worker of that version stored them, by name."""
    namer, parent, made = Namer(OLD_SPACE), Namer(OLD_SPACE).root, {}
    for start in range(0, len(TOKENS), B):
        tokens = TOKENS[start : start + B]
        name = namer.child(parent, tokens)
        made[name] = old_block(name, parent, tokens, bytes(kv(TOKENS, start, B)))
        parent = name
    return made


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Server]:
    with running(server := Server(tmp_path)):
        yield server


def saved(worker: Worker) -> None:
    worker.fill(TOKENS, blocks_for(len(TOKENS)))
    worker.save("s", TOKENS, blocks_for(len(TOKENS)))
    event = worker.event()
    assert isinstance(event, Saved)
    assert event.stored == 3


def loaded(worker: Worker) -> Loaded:
    worker.load("r", (*TOKENS, 7), 0, len(TOKENS), blocks_for(len(TOKENS)))
    event = worker.event()
    assert isinstance(event, Loaded)
    assert worker.holds(TOKENS, 0, event.valid, blocks_for(event.valid))
    return event


def test_redis_with_blocks_of_both_formats(redis: Server) -> None:
    """The old ones are listed and named as such, removed by a repair, and found by no request."""
    old, url = old_chain(), f"redis://{redis.address}"
    with redis.client() as client:
        for name, data in old.items():
            client.set(f"kvrelay:{name.hex()}", data)
    worker = Worker(connect(url), PATIENT)
    assert worker.ask("q", (*TOKENS, 7)) == 0
    worker.connector.release("q")
    saved(worker)
    assert loaded(worker).valid == len(TOKENS)
    assert worker.counters.corrupt == 0
    with closing(connect(url)) as store, closing(browse(url)) as browser:
        listed = list(browser.list(TIMEOUT))
        assert len(listed) == 6
        with pytest.raises(Corrupt, match="version: 2 is not 3"):
            browser.inspect(next(iter(old)), TIMEOUT)
        for repair in (False, True):
            found = {one.listed.name: one for one in verify_blocks(store, listed, 20, repair)}
            for name, one in found.items():
                assert (one.error is not None) == (name in old)
                assert one.error is None or one.error.field == "version"
                assert one.removed == (repair and name in old)
        assert {one.name for one in browser.list(TIMEOUT)} == set(found) - set(old)
    assert loaded(worker).valid == len(TOKENS)
    worker.connector.close()


def test_old_bytes_under_a_new_name_are_a_miss_and_put_again(redis: Server) -> None:
    worker = Worker(connect(f"redis://{redis.address}"), PATIENT)
    names = worker.namer.chain(TOKENS, B)
    with redis.client() as client:
        for name, data in zip(names, old_chain().values(), strict=True):
            client.set(f"kvrelay:{name.hex()}", data)
    events = [loaded(worker)]
    assert (events[0].valid, events[0].missed) == (0, Miss.FAILED_VERIFICATION)
    while events[-1].valid < len(TOKENS):  # a load ends at its first wrong block
        assert len(events) < 9, events
        saved(worker)
        events.append(loaded(worker))
    assert events[-1].missed is None
    worker.connector.close()


@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["memory", "shm", "socket", "grpc", "redis"])
def test_a_store_takes_no_block_of_an_old_writer(
    transport: str, request: pytest.FixtureRequest
) -> None:
    """The writer is told the field, and the blocks around it are stored."""
    ((name, data), *_) = old_chain().items()
    split = int.from_bytes(data[12:16], "little")
    old = Block(data[:split], memoryview(data)[split:])
    around = [make(1000), make(1000)]
    name_in_memory = f"old-{next(NUMBERS)}"
    process, url = None, f"memory://{name_in_memory}"
    if transport == "redis":
        url = f"redis://{request.getfixturevalue('redis').address}"
    elif transport != "memory":
        process, made = start_service("--budget=4MiB")
        url = f"{made}?transport={transport}"
    try:
        with closing(connect(url)) as store:
            offers = [
                Offer(name_of(around[0]), around[0].size, False, lambda: around[0]),
                Offer(name, old.size, False, lambda: old),
                Offer(name_of(around[1]), around[1].size, False, lambda: around[1]),
            ]
            first, refused, last = store.put(offers, TIMEOUT)
            assert first.status is last.status is PutStatus.STORED
            assert (refused.status, refused.reason) == (PutStatus.CORRUPT, "version: 2 is not 3")
            assert store.survey(NameQuery([name]), TIMEOUT).sizes == (None,)
    finally:
        if process is not None:
            stop(process)
        forget(name_in_memory)


def written_by(folder: Path, version: int) -> None:
    """A disk tier's directory as another version left it."""
    folder.mkdir()
    kind = FORMAT.rpartition(" ")[0]
    (folder / "FORMAT").write_text(f"{kind} {version}\n")
    appender = SegmentAppender(folder / f"segment-{5:016x}", 5)
    appender.append([(name, memoryview(data)) for name, data in old_chain().items()])
    appender.close()


@pytest.mark.parametrize("restore", [False, True])
def test_a_directory_of_an_old_format_is_emptied(tmp_path: Path, restore: bool) -> None:
    """Nobody asks for its blocks, and its segments would take room from those that are asked."""
    written_by(folder := tmp_path / "disk", VERSION - 1)
    scan = SegmentScan(files(folder)[0], 5)
    assert (list(scan.locations()), scan.damaged) == ([], 3)
    block, old = make(5000), list(old_chain())
    with inside(folder, restore=restore) as store:
        assert files(folder) == []
        assert (store.disk.counters.restored, store.disk.counters.damaged) == (0, 0)
        found = store.block_store.survey(old, 0.0)
        assert found.sizes == (None,) * 3
        store.fill(block)
    assert (folder / "FORMAT").read_text() == FORMAT
    with inside(folder, restore=True) as store:
        assert store.right(block) == [True]


def test_a_directory_of_a_newer_format_is_left_alone(tmp_path: Path) -> None:
    """It may be used again by the version that wrote it."""
    written_by(folder := tmp_path / "disk", VERSION + 1)
    before = [file.read_bytes() for file in sorted(folder.iterdir())]
    with pytest.raises(Rejected, match="header format 4' and this is"):
        DiskDirectory(str(folder))
    assert [file.read_bytes() for file in sorted(folder.iterdir())] == before
