"""The three transports: how one is chosen, and what happens when it is cut or lies."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from kvrelay.errors import Corrupt, DeadlineExceeded, KvrelayError, Rejected, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.v1 import store_pb2 as pb
from kvstore import PutStatus, Want, connect
from kvstore.base import NameQuery
from kvstore.client.calls import StoreCalls
from kvstore.client.remote import RemoteStore
from kvstore.client.transports import selector, shared_memory, socket_transport
from kvstore.client.transports.connection import (
    StoreConnection,
    dial_tcp,
    dial_unix,
)
from kvstore.client.transports.selector import TRANSPORTS, TransportSelector
from kvstore.wire.frames import ANSWER_BYTES, BlockRow, Op, RequestFrame, Status
from kvstore.wire.pool import ConnectionPool
from tests.failures.proxy import Faults
from tests.failures.proxy import Proxy as SlowProxy
from tests.kvstore.client.proxy import Fault, Proxy
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.rig import (
    TIMEOUT,
    accepted,
    address_of,
    arena_in,
    get,
    make,
    name_of,
    offer,
    put,
)

Proxied = Callable[[str], tuple[RemoteStore, Proxy]]


def seeded() -> random.Random:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture
def proxied(service_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxied]:
    """A client of one transport, with a proxy on it. The others are as they are."""
    host, _, port = address_of(service_url).partition(":")
    stores: list[RemoteStore] = []
    proxies: list[Proxy] = []

    def through(transport: str) -> tuple[RemoteStore, Proxy]:
        direct = RemoteStore(f"{host}:{port}")
        stores.append(direct)
        offered = direct._calls.transports(Deadline.after(TIMEOUT))
        if transport == "shm":
            proxy = Proxy(socket.AF_UNIX, "\0" + offered.unix_socket)
            monkeypatch.setattr(
                shared_memory,
                "dial_unix",
                lambda _, limit, boot: dial_unix(proxy.name, limit, boot),
            )
        elif transport == "socket":
            proxy = Proxy(socket.AF_INET, (host, offered.socket_port))
            monkeypatch.setattr(
                socket_transport,
                "dial_tcp",
                lambda h, _, limit, boot: dial_tcp(h, proxy.port, limit, boot),
            )
        else:
            proxy = Proxy(socket.AF_INET, (host, int(port)))
        proxies.append(proxy)
        stores.append(
            RemoteStore(f"{host}:{proxy.port if transport == 'grpc' else port}", transport)
        )
        stores[-1].clear(TIMEOUT)
        return stores[-1], proxy

    yield through
    for store in stores:
        store.close()
    for proxy in proxies:
        proxy.close()


@pytest.fixture
def plain(service_url: str) -> Iterator[RemoteStore]:
    store = RemoteStore(address_of(service_url), "grpc")
    yield store
    store.close()


@pytest.mark.parametrize(
    ("flags", "transport"),
    [((), "shm"), (("--no-shared",), "socket"), (("--no-shared", "--no-socket"), "grpc")],
)
def test_the_fastest_transport_there_is_is_chosen_and_said_once(
    flags: tuple[str, ...], transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    process, url = start_service("--budget=4MiB", *flags)
    store = RemoteStore(address_of(url))
    try:
        with caplog.at_level(logging.INFO, "kvrelay.store"):
            for _ in range(3):
                block = make(300_000)
                assert put(store, block) == [PutStatus.STORED]
                assert get(store, block)[0].header is not None
        assert store.used == {transport: 6}
        assert len([r for r in caplog.records if "blocks go by" in r.message]) == 1
    finally:
        store.close()
        stop(process)


def test_a_transport_can_be_forced_and_fails_loudly_where_it_is_unavailable(
    service_url: str,
) -> None:
    for transport in TRANSPORTS:
        store = RemoteStore(address_of(service_url), transport)
        block = make(300_000)
        assert put(store, block) == [PutStatus.STORED]
        get(store, block)
        assert set(store.used) == {transport}
        store.close()
    process, url = start_service("--budget=1MiB", "--no-shared", "--no-socket")
    try:
        for transport in ("shm", "socket"):
            store = RemoteStore(address_of(url), transport)
            with pytest.raises(Unavailable, match=f"transport {transport} is unavailable"):
                get(store, make())
            store.close()
    finally:
        stop(process)


def test_a_reason_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store with tenants shares no memory, and is asked for it again for as long as it runs."""
    monkeypatch.setattr(selector, "UNAVAILABLE_SECONDS", 0.0)
    process, url = start_service("--budget=1MiB", "--no-shared", "--no-socket")
    store = RemoteStore(address_of(url))
    try:
        with caplog.at_level(logging.INFO, "kvrelay.store"):
            for _ in range(3):
                assert get(store, make())[0].header is None
        said = [record.message for record in caplog.records if "is unavailable" in record.message]
        assert [line.split("transport ")[1].split()[0] for line in said] == ["shm", "socket"]
    finally:
        store.close()
        stop(process)


@pytest.mark.parametrize("query", ["transport=pigeon", "transport", "fast=1"])
def test_an_unknown_transport_is_refused(query: str) -> None:
    with pytest.raises(Rejected, match=r"transport|fast"):
        connect(f"kvrelay://localhost:1?{query}")


@pytest.mark.parametrize("transport", ["shm", "socket"])
def test_a_transport_that_is_cut_is_left_for_the_next_with_the_same_result(
    proxied: Proxied, plain: RemoteStore, transport: str
) -> None:
    source = seeded()
    store, proxy = proxied(transport)
    blocks = [make(200_000) for _ in range(6)]
    assert set(put(plain, *blocks)) == {PutStatus.STORED}
    breaks = 0
    for _ in range(12):
        # After the 40 bytes with which shared memory is attached.
        proxy.fault = Fault(cut_down=source.randrange(41, 250 if transport == "shm" else 1_200_000))
        store._transports.close()  # new connections, which meet the fault
        assert all(got.header is not None for got in get(store, *blocks))
        breaks += proxy.fault.hit.is_set()
    assert breaks > 3
    assert store.breaks[transport] > 0


def test_what_was_reserved_for_a_socket_that_breaks_is_given_up(
    service_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has not seen the ticket on that socket, so its end says nothing to it."""

    def cut(*_: object, **__: object) -> None:
        raise Unavailable("the socket is cut")

    monkeypatch.setattr(socket_transport, "send_blocks", cut)
    store = RemoteStore(address_of(service_url), "socket")
    offers = [offer(make(300_000)) for _ in range(3)]
    before = store.stats(TIMEOUT).counters.abandoned
    for wait in (0.0, 1.0):  # reserved by the transport itself, or before one was chosen
        found = store._put_asked(offers, wait, Deadline.after(TIMEOUT), set())
        assert [outcome.status for outcome in found] == [PutStatus.PENDING] * 3
        stats = store.stats(TIMEOUT)
        assert (stats.reservations, stats.counters.abandoned - before) == (0, 3)
        before += 3
    assert [outcome.status for outcome in store.put(offers, TIMEOUT)] == [PutStatus.STORED] * 3
    store.close()


@pytest.mark.parametrize("transport", ["shm", "socket"])
def test_a_put_that_is_cut_is_finished_by_the_next_transport(
    proxied: Proxied, plain: RemoteStore, transport: str
) -> None:
    source = seeded()
    store, proxy = proxied(transport)
    for _ in range(8):
        blocks = [make(200_000) for _ in range(6)]
        proxy.fault = Fault(cut_up=source.randrange(49, 900 if transport == "shm" else 1_200_000))
        store._transports.close()
        assert set(put(store, *blocks)) <= {PutStatus.STORED, PutStatus.EXISTED}
        assert all(got.header is not None for got in get(plain, *blocks))
    proxy.fault = Fault()
    stats = plain.stats(TIMEOUT)
    assert (stats.reservations, stats.reserved_bytes) == (0, 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_transport_that_crawls_costs_its_deadline_and_no_more(
    proxied: Proxied, plain: RemoteStore, transport: str
) -> None:
    store, proxy = proxied(transport)
    block = make(4 << 20)
    put(plain, block)
    proxy.fault = Fault(delay=0.3)
    with RemoteAgain(store, transport, proxy) as fresh:
        began = time.monotonic()
        with pytest.raises((DeadlineExceeded, Unavailable)):
            list(fresh.get([Want(name_of(block), memoryview(bytearray(4 << 20)))], 0.5))
        assert time.monotonic() - began < 3


@pytest.mark.slow
def test_a_network_that_is_slow_is_not_a_silent_one() -> None:
    """Megabytes are on their transport before the answer to a ping."""
    blocks = [make(2 << 20) for _ in range(8)]
    process, url = start_service("--budget=64MiB")
    try:
        with SlowProxy(address_of(url)) as proxy:
            store = connect(f"kvrelay://{proxy.address}?transport=grpc")
            put(store, *blocks)
            proxy.down.faults = Faults(rate=1e6)
            assert accepted(store, blocks, 60.0) == (8, 0)
            store.close()
    finally:
        stop(process)


@pytest.mark.parametrize("transport", ["socket", "grpc"])
def test_a_flipped_byte_on_the_way_out_is_found(
    proxied: Proxied, plain: RemoteStore, transport: str
) -> None:
    source = seeded()
    store, proxy = proxied(transport)
    blocks = [make(30_000) for _ in range(3)]
    put(plain, *blocks)
    sums = [0, 0, 0]
    for _ in range(25):
        proxy.fault = Fault(flip_down=source.randrange(100, 90_000))
        with RemoteAgain(store, transport, proxy) as fresh:
            try:
                taken, refused = accepted(fresh, blocks)
            except KvrelayError:
                taken, refused = 0, 0
                sums[2] += 1
            sums[0] += taken
            sums[1] += refused
    print(f"{sums[0]} right, {sums[1]} refused, {sums[2]} calls failed")
    assert sums[0] > 10
    assert sums[1] > 10


class RemoteAgain:
    """The client anew, so that its connections are made while the fault is set."""

    def __init__(self, store: RemoteStore, transport: str, proxy: Proxy) -> None:
        host, _, port = address_of(store.url).partition("?")[0].partition(":")
        self._store = RemoteStore(
            f"{host}:{proxy.port if transport == 'grpc' else port}", transport
        )

    def __enter__(self) -> RemoteStore:
        return self._store

    def __exit__(self, *_: object) -> None:
        self._store.close()


@pytest.mark.parametrize("transport", ["socket", "grpc"])
def test_a_flipped_byte_on_the_way_in_is_refused_or_another_transport_taken(
    proxied: Proxied, plain: RemoteStore, transport: str
) -> None:
    source = seeded()
    store, proxy = proxied(transport)
    refused = 0
    for _ in range(15):
        block = make(300_000)
        proxy.fault = Fault(flip_up=source.randrange(20, 250_000))
        with RemoteAgain(store, transport, proxy) as fresh:
            try:
                (outcome,) = fresh.put([offer(block)], 3.0)
            except KvrelayError:
                continue
        refused += outcome.status is PutStatus.CORRUPT
        taken, wrong = accepted(plain, [block])
        assert (taken, wrong) == (int(outcome.present), 0)
    assert refused > 3
    assert plain.stats(TIMEOUT).counters.corrupt >= refused


def test_a_flipped_byte_in_shared_memory_is_found() -> None:
    source = seeded()
    process, url = start_service("--budget=4MiB")
    store = RemoteStore(address_of(url), "shm")
    try:
        blocks = [make(30_000) for _ in range(3)]
        put(store, *blocks)
        found = store._calls.locate([name_of(b) for b in blocks], 60_000, Deadline.after(TIMEOUT))
        address = arena_in(process)
        with open(f"/proc/{process.pid}/mem", "r+b", buffering=0) as memory:
            for number in range(200):
                which = source.randrange(3)
                at = (
                    address
                    + found.offsets[which]
                    + (
                        source.randrange(256)
                        if number % 2
                        else source.randrange(blocks[which].size)
                    )
                )
                memory.seek(at)
                byte = memory.read(1)
                memory.seek(at)
                memory.write(bytes([byte[0] ^ 1]))
                assert accepted(store, blocks) == (2, 1)
                memory.seek(at)
                memory.write(byte)
        assert accepted(store, blocks) == (3, 0)
        assert store.breaks == {}
    finally:
        store.close()
        stop(process)


def test_the_memory_of_a_killed_store_is_let_go(port_flag: str) -> None:
    """By a client that only looks up, too: or it would be taken twice."""
    process, url = start_service("--budget=1MiB", port_flag)
    store = RemoteStore(address_of(url))
    maps = Path("/proc/self/maps")
    block = make(500_000)
    try:
        assert put(store, block) == [PutStatus.STORED]
        arenas = maps.read_text().count("kvrelay-arena")
        assert arenas
        stop(process)
        process, _ = start_service("--budget=1MiB", port_flag)
        deadline = Deadline.after(TIMEOUT)
        while maps.read_text().count("kvrelay-arena") == arenas:
            assert not deadline.expired, "it is mapped still"
            with contextlib.suppress(Unavailable):
                assert store.lookup(NameQuery([name_of(block)]), TIMEOUT).lead == 0
        assert put(store, block) == [PutStatus.STORED]
        assert set(store.used) == {"shm"}  # and it is the new one's at once
    finally:
        store.close()
        stop(process)


def test_nobody_waits_for_another_s_search_longer_than_he_has_time() -> None:
    """The store stands still while one call, that has time, asks it for its transports."""
    asked, answered = threading.Event(), threading.Event()

    class Silent:
        def transports(self, deadline: Deadline) -> pb.GetTransportsResponse:
            asked.set()
            answered.wait(TIMEOUT)
            raise Unavailable("it is gone")

    selector = TransportSelector("127.0.0.1:1", cast(StoreCalls, Silent()), None)
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(selector.choose, (), Deadline.after(TIMEOUT))
        try:
            assert asked.wait(TIMEOUT)
            with pytest.raises(DeadlineExceeded, match="another call"):
                selector.choose((), Deadline.after(0.05))
            selector.seen_boot(b"another start")
            assert not patient.done()
        finally:
            answered.set()
        with pytest.raises(Unavailable, match="it is gone"):
            patient.result()
    assert not selector.breaks


def test_a_call_without_time_to_connect_blames_no_transport(service_url: str) -> None:
    connection, store = tcp_line(service_url)
    port = store._calls.transports(Deadline.after(TIMEOUT)).socket_port
    pool = ConnectionPool(lambda deadline: dial_tcp("127.0.0.1", port, deadline, connection.boot))
    with pytest.raises(DeadlineExceeded):
        pool.acquire(Deadline.after(0.0))
    connection.sock.close()
    store.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_store_is_not_answered_from_stale_places(transport: str, port_flag: str) -> None:
    process, url = start_service("--budget=4MiB", port_flag)
    store = RemoteStore(address_of(url), transport)
    try:
        old = [make(50_000) for _ in range(4)]
        put(store, *old)
        assert accepted(store, old) == (4, 0)
        process.send_signal(signal.SIGKILL)
        stop(process)
        with pytest.raises(Unavailable):
            accepted(store, old)
        process, _ = start_service("--budget=4MiB", port_flag)
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                assert accepted(store, old) == (0, 0)
                break
            except Unavailable:
                assert time.monotonic() < deadline
        new = [make(50_000) for _ in range(4)]
        put(store, *new)
        assert accepted(store, [*old, *new]) == (4, 0)
        put(store, *old)
        assert accepted(store, [*old, *new]) == (8, 0)
        assert store.stats(TIMEOUT).leases == 0
    finally:
        store.close()
        stop(process)


def test_a_lease_that_ended_during_the_copy_makes_it_a_miss(
    plain: RemoteStore, service_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = make(30_000)
    put(plain, block)
    for transport in ("shm", "socket"):
        store = RemoteStore(address_of(service_url), transport)
        get(store, block)
        module = shared_memory if transport == "shm" else socket_transport
        monkeypatch.setattr(module, "lease_ms", lambda _: 1)
        want = Want(name_of(block), memoryview(bytearray(30_000)))
        late = [
            got.header
            for _ in range(30)
            for got in store.get([Slow(want.name, want.buffer)], TIMEOUT)
        ]
        assert late == [None] * 30
        store.close()


class Slow(Want):
    """A want whose buffer takes a while to be looked at."""

    def __getattribute__(self, name: str) -> object:
        if name == "buffer":
            time.sleep(0.001)
        return object.__getattribute__(self, name)


def test_nobody_but_the_store_writes_to_the_arena(service_url: str) -> None:
    import mmap

    store = RemoteStore(address_of(service_url))
    offered = store._calls.transports(Deadline.after(TIMEOUT))
    connection = dial_unix(offered.unix_socket, Deadline.after(TIMEOUT), offered.boot)
    connection.send(RequestFrame(Op.ATTACH))
    fd, size = connection.receive_descriptor()
    assert size == offered.arena_bytes
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    for descriptor in (fd, again):
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
        assert mapped[:8] == b"KVRARENA"
        mapped.close()
        os.close(descriptor)
    connection.sock.close()
    store.close()


def test_another_user_is_not_let_in(service_url: str) -> None:
    store = RemoteStore(address_of(service_url))
    offered = store._calls.transports(Deadline.after(TIMEOUT))
    store.close()
    script = f"""
import os, socket
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.connect("\\0{offered.unix_socket}")
sock.settimeout(10)
print(sock.recv(1))
"""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    done = subprocess.run(
        ["python3", "-c", script], capture_output=True, text=True, check=False, timeout=TIMEOUT
    )
    assert "b''" in done.stdout or "reset" in done.stderr


def tcp_line(url: str) -> tuple[StoreConnection, RemoteStore]:
    store = RemoteStore(address_of(url), "grpc")
    offered = store._calls.transports(Deadline.after(TIMEOUT))
    connection = dial_tcp("127.0.0.1", offered.socket_port, Deadline.after(TIMEOUT), offered.boot)
    connection.sock.limit(TIMEOUT)
    return connection, store


def test_nothing_is_read_from_a_socket_without_a_lookup(service_url: str) -> None:
    connection, store = tcp_line(service_url)
    mine, theirs = make(1000), make(1000)
    put(store, mine, theirs)
    deadline = Deadline.after(TIMEOUT)
    one = store._calls.locate([name_of(mine)], 60_000, deadline)
    two = store._calls.locate([name_of(theirs)], 60_000, deadline)
    for serial, token in (
        (two.lease, one.proof),
        (two.lease, bytes(16)),
        (one.lease + 10_000, one.proof),
        (0, bytes(16)),
    ):
        stranger, unused = tcp_line(service_url)
        stranger.send(RequestFrame(Op.GET, serial, token, 0, 1))
        with pytest.raises(Corrupt, match="refused: proof"):
            stranger.receive_frame()
        stranger.sock.close()
        unused.close()
    connection.send(RequestFrame(Op.GET, one.lease, one.proof, 0, 1, last=True))
    assert connection.receive_frame().length == mine.size
    assert connection.sock.receive(mine.size) == mine.header + bytes(mine.payload)
    assert connection.receive_body() == b""
    connection.send(RequestFrame(Op.GET, one.lease, one.proof, 0, 1))
    assert connection.receive_frame().status is Status.ENDED
    store._calls.release_lease(two.boot, two.lease, TIMEOUT)
    connection.sock.close()
    store.close()


def test_a_bad_request_on_a_socket_is_refused_and_ends_the_connection(service_url: str) -> None:
    row = BlockRow(b"n" * 32, 1 << 40).encode()
    connection, store = tcp_line(service_url)
    block = make(300 << 10)
    found = store._calls.reserve(
        pb.ReserveRequest(claims=[pb.Claim(name=name_of(block), length=block.size)]),
        Deadline.after(TIMEOUT),
    )
    shown = RequestFrame(Op.PUT, found.ticket, found.proof, count=2, body=len(row))
    connection.sock.close()
    store.close()
    local = [Op.ATTACH, Op.WINDOW, Op.LOCATE, Op.STAGE, Op.RESERVE]
    cases: list[tuple[bytes, str]] = [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n".ljust(48), "magic"),
        (RequestFrame(Op.GET).encode()[:5] + b"\x63" + RequestFrame(Op.GET).encode()[6:], "op"),
        (RequestFrame(Op.GET, body=1 << 40).encode(), "body"),
        (RequestFrame(Op.GET, count=1 << 20).encode(), "count"),
        (RequestFrame(Op.PUT, count=2, body=len(row)).encode() + row, "proof"),
        (shown.encode() + row, "body"),
        (replace(shown, count=1).encode() + row, r"rows\[0\].size"),
        *((RequestFrame(op).encode(), "op") for op in local),
    ]
    for data, field in cases:
        connection, store = tcp_line(service_url)
        connection.sock.send([data])
        with pytest.raises(Corrupt, match=f"refused: {field}"):
            connection.receive_frame()
        with pytest.raises(Unavailable):
            connection.sock.receive(1)
        connection.sock.close()
        store.close()


def test_what_is_being_sent_stays_what_it_is_after_its_lease() -> None:
    """A reader that stalls until its lease is over must not be sent what came to that place."""
    process, url = start_service("--budget=16MiB", "--eviction=lru")
    store = RemoteStore(address_of(url), "grpc")
    block = make(7 << 20)
    try:
        assert put(store, block) == [PutStatus.STORED]
        found = store._calls.locate([name_of(block)], 60_000, Deadline.after(TIMEOUT))
        port = store._calls.transports(Deadline.after(TIMEOUT)).socket_port
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that most of it waits
            sock.settimeout(TIMEOUT)
            sock.connect(("127.0.0.1", port))
            sock.sendall(RequestFrame(Op.GET, found.lease, found.proof, 0, 1).encode())
            assert sock.recv(1, socket.MSG_PEEK)
            store._calls.release_lease(found.boot, found.lease, TIMEOUT)
            for _ in range(16):
                assert put(store, make(1 << 20)) == [PutStatus.STORED]
            sent = bytearray()
            while len(sent) < ANSWER_BYTES + block.size:
                sent += (part := sock.recv(1 << 20))
                assert part, "the store has cut the connection"
        assert sent[ANSWER_BYTES:] == block.header + bytes(block.payload)
        deadline = Deadline.after(TIMEOUT)
        while store.stats(TIMEOUT).leases:
            assert not deadline.expired, "it is held still"
            time.sleep(0.01)
    finally:
        store.close()
        stop(process)


def test_a_window_is_gone_with_its_connection() -> None:
    process, url = start_service("--budget=1MiB")
    store = RemoteStore(address_of(url), "grpc")
    offered = store._calls.transports(Deadline.after(TIMEOUT))
    maps = Path(f"/proc/{process.pid}/maps")
    try:
        for _ in range(8):
            connection = dial_unix(offered.unix_socket, Deadline.after(TIMEOUT), offered.boot)
            connection.send(RequestFrame(Op.WINDOW))
            os.close(connection.receive_descriptor()[0])
            assert "kvrelay-window" in maps.read_text()
            connection.sock.close()
        deadline = Deadline.after(TIMEOUT)
        while "kvrelay-window" in maps.read_text():
            assert not deadline.expired, "windows of closed connections are mapped still"
            time.sleep(0.01)
    finally:
        store.close()
        stop(process)
