"""Events: whoever reads them knows what the store holds, or is told that it does not."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from google.protobuf.message import Message

from kvrelay.errors import Corrupt, Exhausted, Unavailable
from kvrelay.rpc.server.server import Server
from kvrelay.v1 import store_pb2 as pb
from kvstore import Block, Offer, PutStatus
from kvstore.claims import Claim
from kvstore.client.admin import StoreAdmin
from kvstore.client.mirror import StoreMirror
from kvstore.client.remote import RemoteStore
from kvstore.index.entries import IndexEntry
from kvstore.index.events import EventLog, RemovalReason
from kvstore.limits import StoreLimits
from kvstore.server.block_store import BlockStore
from kvstore.server.service import SERVICE_NAME, StoreService, register
from kvstore.server.watching import WatchOptions, WatchServer
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.rig import TIMEOUT, make, name_of, put


def entry(number: int) -> IndexEntry[int]:
    return IndexEntry(Claim(number.to_bytes(32, "little"), 1, False), 0, None, 1)


def test_a_ring_tells_all_or_nothing() -> None:
    events: EventLog[int] = EventLog(4)
    assert (events.after(0, 9), events.after(1, 9)) == ([], None)
    for number in range(1, 11):
        events.add(entry(number), RemovalReason.EVICTED if number % 2 else None)
    assert events.after(5, 9) is None
    for at, limit in ((6, 9), (8, 1), (10, 5)):
        told = events.after(at, limit)
        assert told is not None
        numbers = [int.from_bytes(one.name, "little") for one, _ in told]
        assert numbers == list(range(at + 1, min(at + limit, 10) + 1))
        assert [reason for _, reason in told] == [
            RemovalReason.EVICTED if number % 2 else None for number in numbers
        ]
    assert events.after(11, 9) is None


@pytest.fixture
def address() -> Iterator[str]:
    process, url = start_service("--budget=256KiB", "--partial-life=0.3", "--events=64")
    yield url.removeprefix("kvrelay://")
    stop(process)


def follow(
    admin: StoreAdmin,
    mirror: StoreMirror,
    until: Callable[[], bool],
    boot: bytes = b"",
    sequence: int = 0,
) -> list[str]:
    """Keeps the mirror until something holds; the kinds of messages that came."""
    kinds: list[str] = []
    watch = admin.watch(TIMEOUT, boot, sequence)
    for message in watch:
        kinds.append(message.WhichOneof("part") or "")
        mirror.apply(message)
        if until():
            break
    watch.close()
    return kinds


def offer_of(block: Block, partial: bool) -> Offer:
    return Offer(name_of(block), block.size, partial, lambda: block)


def content(admin: StoreAdmin) -> set[bytes]:
    return {one.name for one in admin.list(TIMEOUT)}


def known(mirror: StoreMirror) -> set[bytes]:
    return {name for _, name in mirror.blocks}


def test_a_model_kept_from_events_is_what_the_store_holds(address: str) -> None:
    """Whatever happens; the ring is short, so the reader falls behind and begins anew at times."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    source, mirror = random.Random(seed), StoreMirror()
    store, admin = RemoteStore(address), StoreAdmin(address)
    blocks = [make(source.randrange(100, 9_000)) for _ in range(100)]
    kinds: list[str] = []
    for _ in range(12):
        for _ in range(source.randrange(1, 12)):
            some = source.sample(blocks, source.randrange(1, 20))
            store.put([offer_of(block, source.random() < 0.2) for block in some], TIMEOUT)
            if source.random() < 0.1:
                store.clear(TIMEOUT)
        sent = put(store, make(10))  # the last event is one of now
        assert sent == [PutStatus.STORED]
        kinds += follow(
            admin, mirror, lambda: known(mirror) == content(admin), mirror.boot, mirror.sequence
        )
    assert store.stats(TIMEOUT).counters.evicted > 0
    assert kinds[0] == "page"
    store.close()
    admin.close()


def test_the_lives_of_partial_blocks_end_with_nobody_asking(address: str) -> None:
    store, admin, mirror = RemoteStore(address), StoreAdmin(address), StoreMirror()
    follow(admin, mirror, lambda: mirror.whole)
    part = make(100)
    store.put([offer_of(part, True)], TIMEOUT)
    told = []
    for message in admin.watch(TIMEOUT, mirror.boot, mirror.sequence):
        told += [(event.block.name, event.removal) for event in message.events.events]
        if len(told) == 2:
            break
    name = name_of(part)
    assert told == [(name, pb.REMOVAL_UNSPECIFIED), (name, pb.REMOVAL_EXPIRED)]
    store.close()
    admin.close()


def test_who_was_there_goes_on_where_it_was(address: str) -> None:
    store, admin, mirror = RemoteStore(address), StoreAdmin(address), StoreMirror()
    first, second = make(), make()
    put(store, first)
    assert follow(admin, mirror, lambda: mirror.whole) == ["page"]
    assert known(mirror) == {name_of(first)}
    put(store, second)
    kinds = follow(admin, mirror, lambda: len(mirror.blocks) == 2, mirror.boot, mirror.sequence)
    assert set(kinds) == {"events"}
    before = StoreMirror()
    ahead = follow(admin, before, lambda: before.whole, mirror.boot, mirror.sequence + 5)
    assert ahead[0] == "page"  # nobody can have read what has not happened
    store.close()
    admin.close()


def test_another_start_begins_with_a_snapshot(port_flag: str) -> None:
    process, url = start_service("--budget=1MiB", port_flag)
    address = url.removeprefix("kvrelay://")
    store, admin, mirror = RemoteStore(address), StoreAdmin(address), StoreMirror()
    try:
        put(store, make())
        follow(admin, mirror, lambda: len(mirror.blocks) == 1)
        boot = mirror.boot
        process.send_signal(signal.SIGKILL)
        with pytest.raises(Unavailable):
            follow(admin, mirror, lambda: False, mirror.boot, mirror.sequence)
        stop(process)
        process, _ = start_service("--budget=1MiB", port_flag)
        follow_when_back(admin, mirror)
        assert mirror.boot != boot
        assert known(mirror) == set()
    finally:
        store.close()
        admin.close()
        stop(process)


def follow_when_back(admin: StoreAdmin, mirror: StoreMirror) -> None:
    deadline = time.monotonic() + TIMEOUT
    boot = mirror.boot
    while True:
        try:
            follow(admin, mirror, lambda: mirror.boot != boot, boot, mirror.sequence)
            return
        except Unavailable:
            assert time.monotonic() < deadline


def test_a_gap_is_not_taken_for_the_truth() -> None:
    mirror, info = StoreMirror(), pb.BlockInfo(name=bytes(32))
    one = pb.BlockEvents(events=[pb.BlockEvent(block=info)])
    with pytest.raises(Corrupt):
        mirror.apply(pb.WatchResponse(boot=b"b", sequence=1, events=one))
    page = pb.SnapshotPage(first=True, last=True)
    mirror.apply(pb.WatchResponse(boot=b"b", sequence=3, page=page))
    mirror.apply(pb.WatchResponse(boot=b"b", sequence=4, events=one))
    for sequence, boot in ((6, b"b"), (4, b"b"), (5, b"c")):
        with pytest.raises(Corrupt, match="sequence"):
            mirror.apply(pb.WatchResponse(boot=boot, sequence=sequence, events=one))
    with pytest.raises(Corrupt, match="page"):
        mirror.apply(pb.WatchResponse(boot=b"b", sequence=5, page=pb.SnapshotPage(last=True)))


class Reader:
    """A context that takes messages while ``open`` is set."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.waits = asyncio.Event()
        self.messages = 0

    async def write(self, message: pb.WatchResponse, /) -> None:
        self.waits.set()
        await self.open.wait()
        self.messages += 1


def fill(block_store: BlockStore, count: int) -> None:
    for _ in range(count):
        block = make(10)
        grant = block_store.reserve([Claim(name_of(block), block.size, False)])
        assert grant.ticket is not None
        (slot,) = block_store.slots(grant.ticket, [name_of(block)])
        assert slot is not None
        slot.copy_from(memoryview(block.header + bytes(block.payload)))
        assert block_store.settle([slot])[0].status is PutStatus.STORED


async def test_who_reads_too_slowly_is_cut_off_with_the_reason() -> None:
    block_store = BlockStore(StoreLimits(1 << 20, events=8))
    watching = WatchServer(
        block_store, WatchOptions(interval=0.01, silence=0.02, stuck=0.05), most=1
    )
    reader = Reader()
    with pytest.raises(Exhausted, match=r"nothing was read .* for 0.05 s"):
        await watching.serve(pb.WatchRequest(), reader)
    watching = WatchServer(block_store, WatchOptions(interval=0.01, silence=0.02), most=1)
    reader = Reader()
    serving = asyncio.ensure_future(watching.serve(pb.WatchRequest(), reader))
    await reader.waits.wait()
    with pytest.raises(Exhausted, match="too many"):
        await watching.serve(pb.WatchRequest(), Reader())
    fill(block_store, 20)
    reader.open.set()
    with pytest.raises(Exhausted, match="watch anew"):
        await asyncio.wait_for(serving, TIMEOUT)
    assert reader.messages == 1  # the snapshot it began with
    with pytest.raises(Exhausted, match="nothing was read"):  # its place is free again
        await WatchServer(block_store, WatchOptions(stuck=0.01), most=1).serve(
            pb.WatchRequest(), Reader()
        )


async def test_a_snapshot_that_leads_nowhere_is_not_read_to_its_end() -> None:
    """What is in it is kept for its reader, who could take hours."""
    block_store = BlockStore(StoreLimits(8 << 20, events=8))
    fill(block_store, 2500)
    reader = Reader()
    serving = asyncio.ensure_future(WatchServer(block_store).serve(pb.WatchRequest(), reader))
    await reader.waits.wait()
    fill(block_store, 20)
    reader.open.set()
    with pytest.raises(Exhausted, match="watch anew"):
        await asyncio.wait_for(serving, TIMEOUT)
    assert reader.messages == 1


async def exhaust(call: grpc.aio.UnaryStreamCall[Message, pb.WatchResponse]) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_silent_client_of_a_real_stream_is_cut_off() -> None:
    block_store = BlockStore(StoreLimits(64 << 20))
    service = StoreService(block_store, watch_options=WatchOptions(interval=0.001, stuck=0.2))
    server = Server()
    server.add(SERVICE_NAME, lambda bare: register(service, bare))
    address = await server.start()
    fill(block_store, 3000)
    small = (("grpc.http2.lookahead_bytes", 1 << 16), ("grpc.http2.bdp_probe", 0))
    try:
        async with grpc.aio.insecure_channel(address, options=small) as channel:
            call = channel.unary_stream(
                f"/{SERVICE_NAME}/Watch",
                pb.WatchRequest.SerializeToString,
                pb.WatchResponse.FromString,
            )(pb.WatchRequest(boot=block_store.boot, sequence=0), timeout=TIMEOUT)
            assert isinstance(await call.read(), pb.WatchResponse)
            while service.watchers:  # nothing is read meanwhile
                fill(block_store, 200)
                await asyncio.sleep(0)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await exhaust(call)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "watch anew" in (caught.value.details() or "")
    finally:
        await server.stop()
