"""A block that went wrong in the store's memory: its reader leaves at it, and it makes room."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pytest

from kvrelay.block.header import decode
from kvrelay.block.mac import BlockKey
from kvrelay.block.verify import verify_payload
from kvrelay.errors import Corrupt, Rejected
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.security.identity import Caller, CallerKind, Tenant, set_caller
from kvrelay.usage import Miss
from kvrelay.v1 import store_pb2 as pb
from kvstore import Block, PutStatus, Store, Want, connect
from kvstore.base import NameQuery
from kvstore.claims import Claim
from kvstore.client import remote
from kvstore.client.memory import MemoryStore, forget
from kvstore.client.remote import RemoteStore
from kvstore.client.transports.selector import TRANSPORTS
from kvstore.index.events import RemovalReason
from kvstore.limits import StoreLimits
from kvstore.server.block_store import BlockStore
from kvstore.server.service import StoreService
from kvstore.server.tenants import OPEN_SCOPE, TenantScope, TenantTable
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.disk.rig import inside, until
from tests.kvstore.disk.test_tiered_index import new, save
from tests.kvstore.disk.test_tiered_index import put as book
from tests.kvstore.rig import (
    TIMEOUT,
    address_of,
    arena_in,
    get,
    make,
    name_of,
    present,
    put,
    sealed,
    why,
)

SIZE = 30_000
PLACES = pytest.mark.parametrize("at", [100, SIZE - 1], ids=["header", "payload"])


def leave_at(store: Store, block: Block) -> bool:
    """Reads it and goes away; whether what came was right."""
    want = Want(name_of(block), memoryview(bytearray(block.payload.nbytes)))
    with closing(store.get([want, want], TIMEOUT)) as arriving:
        got = next(arriving)
        assert got.header is not None
        try:
            verify_payload(decode(got.header), want.buffer)
        except Corrupt:
            return False
        return True


@dataclass
class Served:
    """A service and its memory."""

    url: str
    arena: int
    memory: BinaryIO

    def read(self, offset: int, size: int) -> bytes:
        self.memory.seek(self.arena + offset)
        return self.memory.read(size)

    def flip(self, offset: int) -> None:
        (byte,) = self.read(offset, 1)
        self.memory.seek(self.arena + offset)
        self.memory.write(bytes([byte ^ 1]))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    process, url = start_service("--budget=1MiB")
    with open(f"/proc/{process.pid}/mem", "r+b", buffering=0) as memory:
        yield Served(url, arena_in(process), memory)
    stop(process)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine is not what is tested here."""
    monkeypatch.setattr(remote, "RECHECK_SECONDS", TIMEOUT)


@pytest.mark.usefixtures("patient")
@PLACES
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_leaves_at_a_wrong_block_makes_room_for_the_right_one(
    served: Served, transport: str, at: int
) -> None:
    store, other = (
        connect(f"{served.url}?transport={transport}"),
        RemoteStore(address_of(served.url), "grpc"),
    )
    try:
        store.clear(TIMEOUT)
        block, beside = make(SIZE), make(SIZE)
        assert put(store, block, beside) == [PutStatus.STORED] * 2
        before = store.stats(TIMEOUT).counters.corrupt
        held = other._calls.locate([name_of(block)], 60_000, Deadline.after(TIMEOUT))
        served.flip(held.offsets[0] + at)
        wrong = served.read(held.offsets[0], block.size)
        assert put(store, block) == [PutStatus.EXISTED]

        assert not leave_at(store, block)
        assert present(store, block, beside) == [False, True]
        assert why(store, name_of(block)) is Miss.FAILED_VERIFICATION
        assert get(other, block)[0].header is None
        until(lambda: store.stats(TIMEOUT).leases == 1)  # a stream that was left ends soon
        stats = store.stats(TIMEOUT)
        assert stats.counters.corrupt == before + 1
        assert (stats.leased_bytes, stats.entries) == (block.size, 1)

        assert put(store, block) == [PutStatus.STORED]
        assert leave_at(store, block)
        for _ in range(60):  # the whole store over
            assert put(store, make(SIZE)) == [PutStatus.STORED]
        assert served.read(held.offsets[0], block.size) == wrong, "what a lease holds stays so"
        other._calls.release_lease(held.boot, held.lease, TIMEOUT)
        until(lambda: store.stats(TIMEOUT).leases == 0)
        stats = store.stats(TIMEOUT)
        assert (stats.leased_bytes, stats.counters.corrupt) == (0, before + 1)
        store.clear(TIMEOUT)
        assert store.stats(TIMEOUT).bytes == 0
    finally:
        store.close()
        other.close()


@pytest.mark.usefixtures("patient")
def test_a_right_block_stays_and_an_absent_one_is_absent(served: Served) -> None:
    store = RemoteStore(address_of(served.url))
    try:
        block = make(SIZE)
        put(store, block)
        before = store.stats(TIMEOUT).counters.corrupt
        assert leave_at(store, block)
        for one in (block, make()):
            request = pb.RecheckRequest(name=name_of(one))
            assert not store._calls.stub.Recheck(request, timeout=TIMEOUT).removed
        assert present(store, block) == [True]
        assert store.stats(TIMEOUT).counters.corrupt == before
        until(lambda: store.stats(TIMEOUT).leases == 0)
    finally:
        store.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_reader_does_not_notice_that_nobody_looked_again(
    served: Served, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, block = RemoteStore(address_of(served.url), transport), make(SIZE)
    want = Want(name_of(block), memoryview(bytearray(SIZE)))
    put(store, block)
    arriving = store.get([want, want], TIMEOUT)
    assert next(arriving).header is not None
    store.close()
    with caplog.at_level(logging.INFO, "kvrelay.store"):
        arriving.close()
    told = [r.levelname for r in caplog.records if "was not verified again" in r.message]
    assert told == ["INFO"]


def test_in_this_process_too() -> None:
    store, block = MemoryStore("recheck"), make()
    try:
        put(store, block)
        assert leave_at(store, block)
        held = store.lookup(NameQuery([name_of(block)], ttl=60.0), TIMEOUT)
        entry = store._shared.index.find(name_of(block), 0.0)
        assert entry is not None
        entry.value = entry.value[:-1] + bytes([entry.value[-1] ^ 1])
        assert put(store, block) == [PutStatus.EXISTED]
        assert not leave_at(store, block)
        assert why(store, name_of(block)) is Miss.FAILED_VERIFICATION
        assert put(store, block) == [PutStatus.STORED]
        assert leave_at(store, block)
        assert store.stats(TIMEOUT).counters.corrupt == 1
        assert held.lease is not None
        store.release([held.lease], TIMEOUT)
        assert store._shared.index.audit() == []
    finally:
        forget("recheck")


def keep(
    block_store: BlockStore, block: Block, scope: TenantScope = OPEN_SCOPE, partial: bool = False
) -> PutStatus:
    """As a writer does."""
    claim = Claim(scope.key(name_of(block)), block.size, partial)
    grant = block_store.reserve([claim])
    if grant.ticket is None:
        assert grant.verdicts == (PutStatus.EXISTED,)
        return PutStatus.EXISTED
    (slot,) = block_store.slots(grant.ticket, [claim.name])
    assert slot is not None
    slot.copy_from(memoryview(block.header + bytes(block.payload)))
    return block_store.settle([slot])[0].status


def flip(block_store: BlockStore, key: bytes) -> int:
    """One byte of a block in memory; its place."""
    found = block_store._index.find(key, 0.0)
    assert found is not None
    block_store.arena.view(found.value, found.size)[-1] ^= 1
    return found.value


@pytest.mark.parametrize("partial", [False, True])
def test_its_place_is_free_when_the_last_lease_has_ended(partial: bool) -> None:
    block_store = BlockStore(StoreLimits(1 << 20, partial_life=60.0))
    block = make(SIZE)
    name = name_of(block)
    assert keep(block_store, block, partial=partial) is PutStatus.STORED
    lease = block_store.locate([name], 60.0).lease
    assert lease is not None
    place = flip(block_store, name)
    assert block_store.recheck(name) is not None
    assert block_store.recheck(name) is None, "it is there no more"
    assert keep(block_store, block, partial=partial) is PutStatus.STORED
    with block_store.lend(lease.id, 0, 1) as lent:  # a lane may send it still
        assert lent is not None
        block_store.release([lease.id])
        newer = block_store.locate([name], 60.0)
        assert newer.blocks[0] is not None
        assert newer.blocks[0][1] != place
        assert block_store.recheck(name) is None
        assert block_store._index.audit() == []
        assert block_store.stats().bytes == 2 * block.size
    assert newer.lease is not None
    assert block_store.stats().bytes == block.size
    told = [(entry.name, reason) for entry, reason in block_store.events(0, 10) or []]
    assert told == [(name, None), (name, RemovalReason.CORRUPT), (name, None)]
    block_store.release([newer.lease.id])
    assert block_store.clear() == 1
    assert block_store._index.audit() == []
    assert (
        block_store.stats().bytes,
        block_store.stats().leases,
        block_store.arena.slots.used,
    ) == (0, 0, 0)


def test_another_fleets_block_stays_unless_ours_refuses_it() -> None:
    """Two fleets share a store that has the key of one. A name belongs to one of them."""
    ours, theirs = BlockKey(b"k" * 32), BlockKey(b"o" * 32)
    block_store = BlockStore(StoreLimits(1 << 20), block_key=ours)
    for block in (sealed(make(SIZE), theirs), make(SIZE)):
        name = name_of(block)
        assert keep(block_store, block) is PutStatus.STORED
        for proof in (b"", theirs.proof(name), ours.proof(b"x" * 32), ours.proof(name)[:-1]):
            assert block_store.recheck(name, proof) is None
        assert block_store.stats().entries == 1
        assert keep(block_store, block) is PutStatus.EXISTED
        error = block_store.recheck(name, ours.proof(name))  # a stranger's, under our name
        assert error is not None
        assert error.field == "tag"
        assert keep(block_store, block) is PutStatus.STORED
        flip(block_store, name)
        error = block_store.recheck(name, theirs.proof(name))
        assert error is not None
        assert error.field == "payload_checksum"
    right = sealed(make(SIZE), ours)
    assert keep(block_store, right) is PutStatus.STORED
    assert block_store.recheck(name_of(right), ours.proof(name_of(right))) is None
    assert block_store._index.audit() == []


def test_a_tenant_has_its_own_blocks_looked_at_only() -> None:
    tenants = [Tenant(name, name.encode(), store_bytes=100_000) for name in ("a", "b")]
    block_store = BlockStore(StoreLimits(1 << 20), TenantTable.of(tenants, 1 << 20))
    service, block = StoreService(block_store), make(SIZE)
    key = block_store.tenants.named("a").key(name_of(block))
    assert keep(block_store, block, block_store.tenants.named("a")) is PutStatus.STORED
    flip(block_store, key)

    async def recheck(identity: Caller, name: bytes = name_of(block)) -> bool:
        set_caller(identity)
        return (await service.recheck(pb.RecheckRequest(name=name), None)).removed

    for other in (
        Caller(CallerKind.CLIENT, tenants[1]),
        Caller(CallerKind.SERVICE),
        Caller(CallerKind.ADMIN),
    ):
        assert not asyncio.run(recheck(other))
        with pytest.raises(Rejected, match="name"):
            asyncio.run(recheck(other, key))
    assert block_store.stats().entries == 1
    assert asyncio.run(recheck(Caller(CallerKind.CLIENT, tenants[0])))
    assert block_store.stats().entries == 0
    assert block_store._index.audit() == []


def test_a_right_copy_on_disk_comes_up_again(tmp_path: Path) -> None:
    with inside(tmp_path) as store:
        block, name = (made := make(SIZE)), name_of(made)
        store.fill(block)
        lease = store.block_store.locate([name], 60.0).lease
        assert lease is not None
        flip(store.block_store, name)
        assert store.block_store.recheck(name) is not None
        assert store.put(block) is PutStatus.EXISTED
        assert store.right(block) == [True]
        store.block_store.release([lease.id])
        assert store.block_store._index.audit() == []
        assert store.block_store.stats().counters.corrupt == 1
        assert store.disk.counters.corrupt == 0


def test_what_went_wrong_before_it_was_written_is_not_on_disk() -> None:
    index, ground = new()
    book(index, b"a")
    batch = index.next_writes(1 << 20)
    found = index.hold_for_check(b"a", 0.0)
    assert found is not None
    entry, lease = found
    assert index.remove_corrupt(entry)
    assert not index.remove_corrupt(entry)
    assert book(index, b"a") == [PutStatus.RESERVED]
    index.release(lease.id)
    assert len(ground.free) == ground.count - 2, "it is being written still"
    index.segments.open(1, 0)
    index.finish_write(1, 100, batch, [0])
    assert b"a" not in index.segments
    assert len(ground.free) == ground.count - 1
    assert save(index, 2) == 1
    assert b"a" in index.segments
    assert index.audit() == []
