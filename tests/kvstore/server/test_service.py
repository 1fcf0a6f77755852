"""The service as a process: bad input, writers that die, restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from kvrelay.errors import DeadlineExceeded, KvrelayError, Rejected, Unavailable
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import store_pb2 as pb
from kvstore import Block, Offer, PutStatus, Tail, connect
from kvstore.base import NameQuery
from kvstore.breaker import BreakerStore
from kvstore.claims import Claim
from kvstore.client.remote import RemoteStore
from kvstore.limits import StoreLimits
from kvstore.server.block_store import BlockStore
from kvstore.server.service import StoreService
from kvstore.wire.buffers import data_messages
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.rig import TIMEOUT, PausedClock, get, make, name_of, offer, put

PATH = "/kvrelay.v1.StoreService/"


@pytest.fixture
def channel(service_url: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(service_url.removeprefix("kvrelay://")) as opened:
        yield opened


@pytest.fixture
def store(service_url: str) -> Iterator[RemoteStore]:
    made = RemoteStore(service_url.removeprefix("kvrelay://"))
    made.clear(TIMEOUT)
    yield made
    made.close()


def raw_put(channel: grpc.Channel, messages: list[bytes]) -> pb.PutResponse:
    call: grpc.StreamUnaryMultiCallable[bytes, pb.PutResponse]
    call = channel.stream_unary(PATH + "Put", None, pb.PutResponse.FromString)
    try:
        return call(iter(messages), timeout=TIMEOUT)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def head(*claims: pb.Claim, ticket: int = 0) -> bytes:
    return pb.PutRequest(head=pb.PutHead(ticket=ticket, claims=claims)).SerializeToString()


def claim_of(size: int, name: bytes = b"c" * 32) -> pb.Claim:
    return pb.Claim(name=name, length=size)


@pytest.mark.parametrize(
    ("names", "tails", "ttl", "field"),
    [
        ([b"short"], [], 0.0, "names[0]"),
        ([b"n" * 32, b"n" * 33], [], 0.0, "names[1]"),
        ([b"n" * 32] * 65_537, [], 0.0, "names"),
        ([], [Tail(0, b"")], 0.0, "tails[0]"),
        ([], [Tail(0, b"n" * 32)] * 17, 0.0, "tails"),
        ([], [], 601.0, "lease_ms"),
    ],
)
def test_a_bad_lookup_is_refused_by_field(
    store: RemoteStore, names: list[bytes], tails: list[Tail], ttl: float, field: str
) -> None:
    with pytest.raises(Rejected) as caught:
        store.lookup(NameQuery(names, tails, ttl=ttl), TIMEOUT)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("claims", "field"),
    [
        ([claim_of(10)], "claims[0].length"),
        ([claim_of(1 << 62)], "claims[0].length"),
        ([claim_of(9 << 20)], "claims[0].length"),
        ([claim_of(256, b"short")], "claims.name[0]"),
        ([claim_of(256), claim_of(256)], "claims"),
    ],
)
def test_a_bad_claim_is_refused_before_anything_is_allocated(
    channel: grpc.Channel, claims: list[pb.Claim], field: str
) -> None:
    with pytest.raises(Rejected) as caught:
        raw_put(channel, [head(*claims)])
    assert caught.value.field == field


def test_a_put_without_sense_is_refused_and_leaves_nothing(
    channel: grpc.Channel, store: RemoteStore
) -> None:
    block = make(1000)
    claim = pb.Claim(name=name_of(block), length=block.size)
    data = list(data_messages([memoryview(block.header), block.payload]))
    half = list(data_messages([memoryview(block.header)]))
    for messages in (
        [],
        data,
        [head(claim)],
        [head(claim), *half],
        [head(claim), head(claim)],
        [head(claim), *data, *half],
        [head(claim), b"\x12\xff\xff\xff\xff\x0f"],
        [head(claim), b"\x1a\x00"],
        [b""],
        [b"\x0a\x02\xff\xff"],
    ):
        before = store.stats(TIMEOUT).counters.stored
        with pytest.raises(Rejected, match=r"^(head|data): "):
            raw_put(channel, messages)
        stats = store.stats(TIMEOUT)
        assert (stats.reservations, stats.reserved_bytes) == (0, 0)
        assert stats.counters.stored - before == (messages[1:] == [*data, *half])
        store.clear(TIMEOUT)
    assert raw_put(channel, [head(claim), *data]).verdicts[0] == pb.VERDICT_STORED


def test_a_foreign_ticket_commits_nothing(channel: grpc.Channel, store: RemoteStore) -> None:
    block = make(1000)
    claim = pb.Claim(name=name_of(block), length=block.size)
    data = list(data_messages([memoryview(block.header), block.payload]))
    answer = raw_put(channel, [head(claim, ticket=123_456), *data])
    assert answer.verdicts[0] == pb.VERDICT_EXPIRED
    assert store.stats(TIMEOUT).entries == 0


def test_the_wire_is_protobuf_for_those_who_like_it(
    channel: grpc.Channel, store: RemoteStore
) -> None:
    """Messages made by hand are those the library makes and reads."""
    block = make(3 << 20)
    claim = pb.Claim(name=name_of(block), length=block.size)
    whole = block.header + bytes(block.payload)
    parts = [whole[:1_000_000], whole[1_000_000:]]
    sent = [pb.PutRequest(data=part).SerializeToString() for part in parts]
    assert raw_put(channel, [head(claim), *sent]).verdicts[0] == pb.VERDICT_STORED
    call: grpc.UnaryStreamMultiCallable[pb.GetRequest, pb.GetResponse] = channel.unary_stream(
        PATH + "Get", pb.GetRequest.SerializeToString, pb.GetResponse.FromString
    )
    first, *rest = call(pb.GetRequest(names=[claim.name, b"x" * 32]), timeout=TIMEOUT)
    assert list(first.head.lengths) == [block.size, 0]
    assert b"".join(part.data for part in rest) == whole


def test_a_writer_that_dies_gives_up_its_reservation(service_url: str, store: RemoteStore) -> None:
    block = make(4 << 20)
    claim = f"pb.Claim(name=bytes.fromhex('{name_of(block).hex()}'), length={block.size})"
    script = f"""
import grpc, os, threading
from kvrelay.v1 import store_pb2 as pb
def messages():
    yield pb.PutRequest(head=pb.PutHead(claims=[{claim}])).SerializeToString()
    yield pb.PutRequest(data=bytes(1 << 20)).SerializeToString()
    print("half", flush=True)
    threading.Event().wait()
channel = grpc.insecure_channel("{service_url.removeprefix("kvrelay://")}")
channel.stream_unary("{PATH}Put", None, None)(messages())
"""
    writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "half\n"
    while store.stats(TIMEOUT).reservations == 0:
        pass
    waiting = threading.Thread(target=lambda: results.append(put(store, block)))
    results: list[list[PutStatus]] = []
    waiting.start()
    stop(writer)
    waiting.join(TIMEOUT)
    assert results == [[PutStatus.STORED]]
    get(store, block)


def test_a_reservation_nobody_uses_ends_by_itself(
    channel: grpc.Channel, store: RemoteStore
) -> None:
    """The service of these tests gives writers four seconds."""
    block = make(1 << 20)
    reserve: grpc.UnaryUnaryMultiCallable[pb.ReserveRequest, pb.ReserveResponse]
    reserve = channel.unary_unary(
        PATH + "Reserve", pb.ReserveRequest.SerializeToString, pb.ReserveResponse.FromString
    )
    request = pb.ReserveRequest(claims=[pb.Claim(name=name_of(block), length=block.size)])
    began = time.monotonic()
    assert reserve(request, timeout=TIMEOUT).verdicts[0] == pb.VERDICT_RESERVED
    assert reserve(request, timeout=TIMEOUT).verdicts[0] == pb.VERDICT_PENDING
    assert put(store, block) == [PutStatus.STORED]
    assert time.monotonic() - began > 4


@pytest.mark.slow
def test_a_writer_that_stands_still_holds_no_place(
    channel: grpc.Channel, store: RemoteStore
) -> None:
    """It leaves the call open, without a deadline of its own."""
    call: grpc.StreamUnaryMultiCallable[bytes, pb.PutResponse]
    call = channel.stream_unary(PATH + "Put", None, pb.PutResponse.FromString)
    over = threading.Event()

    def stalled(block: Block) -> Iterator[bytes]:
        yield head(claim_of(block.size, name_of(block)))
        over.wait(TIMEOUT)

    try:
        for _ in range(2):  # of 7 MiB each, in a store of 16
            calls = [call.future(stalled(make(7 << 20))) for _ in range(2)]
            for one in calls:
                with pytest.raises(grpc.RpcError) as raised:
                    one.result(TIMEOUT)
                assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        blocks = [make(7 << 20) for _ in range(2)]
        assert put(store, *blocks) == [PutStatus.STORED] * 2
        get(store, *blocks)
    finally:
        over.set()


async def test_a_get_whose_lease_is_over_sends_no_more() -> None:
    """Its reader took nothing for a minute, say: other blocks may be there by now."""
    block_store, block = BlockStore(StoreLimits(8 << 20)), make(2 << 20)
    grant = block_store.reserve([Claim(name_of(block), block.size, partial=False)])
    (slot,) = block_store.slots(grant.ticket or 0, [name_of(block)])
    assert slot is not None
    slot.copy_from(memoryview(block.header + bytes(block.payload)))
    assert block_store.settle([slot])[0].status is PutStatus.STORED
    answers = StoreService(block_store).get(pb.GetRequest(names=[name_of(block)]), None)
    await anext(answers)
    await anext(answers)
    assert block_store.stats().leases == 1
    block_store.release(range(100))
    with pytest.raises(DeadlineExceeded, match="the client read nothing for 60"):
        await anext(answers)


def test_another_writer_is_waited_for_only_so_long(
    channel: grpc.Channel, store: RemoteStore
) -> None:
    block = make(100)
    reserve: grpc.UnaryUnaryMultiCallable[pb.ReserveRequest, pb.ReserveResponse]
    reserve = channel.unary_unary(
        PATH + "Reserve", pb.ReserveRequest.SerializeToString, pb.ReserveResponse.FromString
    )
    claim = pb.Claim(name=name_of(block), length=block.size)
    reserve(pb.ReserveRequest(claims=[claim]), timeout=TIMEOUT)
    # Half of the ticket's life: the store answers within it, and the ticket outlives it.
    assert store.put([offer(block)], 2.0)[0].status is PutStatus.PENDING


def test_a_restart_is_seen_and_old_leases_are_void(port_flag: str) -> None:
    process, url = start_service("--budget=1MiB", port_flag)
    store = connect(url)
    try:
        block = make()
        put(store, block)
        found = store.lookup(NameQuery([name_of(block)], ttl=60), TIMEOUT)
        assert found.lease is not None
        stop(process)
        with pytest.raises(Unavailable):
            store.lookup(NameQuery([name_of(block)], ttl=60), TIMEOUT)
        process, _ = start_service("--budget=1MiB", port_flag)
        boot = _boot_when_back(store)
        assert boot != found.lease.boot
        assert store.lookup(NameQuery([name_of(block)], ttl=60), TIMEOUT).lead == 0
        put(store, block)
        assert store.lookup(NameQuery([name_of(block)], ttl=60), TIMEOUT).lead == 1
        store.release([found.lease], TIMEOUT)
        assert store.stats(TIMEOUT).leases == 1
    finally:
        store.close()
        stop(process)


def _boot_when_back(store: object) -> bytes:
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            return store.stats(TIMEOUT).boot  # type: ignore[attr-defined, no-any-return]
        except Unavailable:
            assert time.monotonic() < deadline


def test_a_stopped_store_costs_a_deadline_twice() -> None:
    process, url = start_service("--budget=1MiB")
    clock = PausedClock()
    store = BreakerStore(RemoteStore(url.removeprefix("kvrelay://")), clock)
    try:
        assert store.stats(TIMEOUT).entries == 0
        os.kill(process.pid, signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(DeadlineExceeded):
                store.lookup(NameQuery([b"n" * 32]), 0.2)
        for _ in range(48):
            with pytest.raises(Unavailable, match="next try"):
                store.lookup(NameQuery([b"n" * 32]), 0.2)
        clock.go_on()
        os.kill(process.pid, signal.SIGCONT)
        assert _boot_when_back(store)
    finally:
        store.close()
        stop(process)


def test_a_closed_store_says_so(service_url: str) -> None:
    store = connect(service_url)
    store.close()
    with pytest.raises(Unavailable, match="closed"):
        store.stats(TIMEOUT)
    with pytest.raises(Unavailable):
        store.put([Offer(b"n" * 32, 1 << 20, False, lambda: make())], TIMEOUT)


def test_the_process_ends_on_a_signal_and_refuses_a_bad_flag() -> None:
    process, _ = start_service("--budget=1MiB")
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT) == 0
    stop(process)
    command = [sys.executable, "-m", "kvstore", "--budget", "lots"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "budget" in done.stderr
    done = subprocess.run([*command[:-1], "1000TiB"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "budget: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("call", ["get", "put", "lookup"])
def test_closing_ends_the_calls_under_way(call: str) -> None:
    process, url = start_service("--budget=1MiB")
    store = RemoteStore(url.removeprefix("kvrelay://"))
    block = make()
    errors: list[type[KvrelayError]] = []
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: get(store, block),
        "put": lambda: put(store, block),
        "lookup": lambda: store.lookup(NameQuery([name_of(block)]), TIMEOUT),
    }

    def ask() -> None:
        try:
            calls[call]()
        except KvrelayError as error:
            errors.append(type(error))

    try:
        store.stats(TIMEOUT)
        os.kill(process.pid, signal.SIGSTOP)
        thread = threading.Thread(target=ask)
        thread.start()
        threading.Event().wait(0.2)
        store.close()
        thread.join(TIMEOUT / 2)
        assert errors == [Unavailable], "it ended before its time was over"
    finally:
        stop(process)


def test_a_budget_beyond_the_memory_of_the_machine_is_refused_at_start() -> None:
    command = [sys.executable, "-m", "kvstore", "--budget=900TiB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "budget: 921,600.0 GiB is more memory than there is here: " in done.stderr
    assert "are free" in done.stderr
