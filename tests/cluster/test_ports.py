"""Reserved ports: the cluster's servers share them in turn, other users and clusters cannot."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.layout import ROOT, process_specs
from kvrelay.cluster.ports import ReservedPorts, WantedPort, free_ports, is_free
from kvrelay.cluster.supervisor import wanted_ports
from kvrelay.errors import Rejected
from kvrelay.rpc import reserved
from kvrelay.rpc.address import Address
from kvrelay.rpc.server import exposition
from kvrelay.rpc.server.server import Server, ServerOptions
from kvstore.limits import StoreLimits
from kvstore.server.block_store import BlockStore
from kvstore.server.listener import ListenerOptions, TransportListener
from router.http.connection.table import HttpLimits
from router.http.server import HttpServer
from tests.cluster.thief import HARMLESS, OVERLAPPING, Thief

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ports are reserved on Linux only")
HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def thief() -> Iterator[Thief]:
    with Thief() as running:
        yield running


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


def listening(port: int, *, shared: bool = True) -> socket.socket:
    """A server as the services make theirs."""
    made = socket.create_server((HOST, port), reuse_port=shared)
    made.settimeout(10)
    return made


def test_free_ports_are_none_of_those_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a layout: a random port may be one that the user has named."""
    config = ClusterConfig(model=str(ROOT / "kvrelay/recall/model"), port=0, prefill=2, decode=2)
    drawn = iter((20_000, 20_001, 20_005, *range(20_000, 21_000)))
    monkeypatch.setattr(random, "randrange", lambda low, high: next(drawn))
    named = replace(config, http_port=20_000, metrics_port=20_001, store_port=20_020)
    found = [wanted.port for wanted in wanted_ports(process_specs(named))]
    assert len(found) == len(set(found)) == 14
    assert {20_000, *range(20_001, 20_007), 20_020} <= set(found)


def test_no_other_user_can_take_a_reserved_port(thief: Thief, port: int) -> None:
    """In every phase of a server's life; with ``SO_REUSEADDR`` it used to be possible."""
    before = thief.ask("steal", [port])
    assert any("reuse address" in way for way in before)  # the thief can steal
    with closing(ReservedPorts([WantedPort(HOST, port)])):
        assert thief.ask("steal", [port]) == []
        for _ in range(3):
            with listening(port):
                assert thief.ask("steal", [port]) == []
            assert thief.ask("steal", [port]) == []
        with listening(port) as server, socket.create_connection((HOST, port), 10) as client:
            server.accept()[0].close()  # the server's end waits in the kernel for the client's
            server.close()
            assert thief.ask("steal", [port]) == []
            client.recv(1)
        assert thief.ask("steal", [port]) == []
    assert thief.ask("steal", [port])


def test_the_reservation_outlives_the_supervisor_in_its_children(thief: Thief, port: int) -> None:
    ports = ReservedPorts([WantedPort(HOST, port)])
    child = reserved.join(reserved.variable([Address(HOST, port)]))
    assert len(child) == 1
    ports.close()
    assert thief.ask("steal", [port]) == []
    with listening(port):
        assert thief.ask("steal", [port]) == []
    assert thief.ask("steal", [port]) == []
    child[0].close()
    assert is_free(port)


@pytest.mark.parametrize("host", OVERLAPPING)
def test_a_socket_bound_before_the_reservation_takes_nothing(host: str, port: int) -> None:
    """The other user was first, with a socket that does not listen yet."""
    with Thief() as thief:
        assert thief.ask("bind", [port], [host])
        with closing(ReservedPorts([WantedPort(HOST, port)])), listening(port) as server:
            assert thief.ask("listen", []) == []
            assert thief.ask("steal", [port]) == []
            server.close()
            assert thief.ask("listen", []) == []
            assert thief.ask("steal", [port]) == []


@pytest.mark.parametrize("first", [True, False])
def test_sockets_at_other_addresses_open_no_way(first: bool, port: int) -> None:
    """The kernel keeps for each port what it need not check, whatever the addresses."""
    with Thief() as thief:
        if first:
            assert thief.ask("bind", [port], HARMLESS)
        with closing(ReservedPorts([WantedPort(HOST, port)])):
            assert thief.ask("bind", [port], HARMLESS)
            assert thief.ask("steal", [port]) == []
            with listening(port):
                assert thief.ask("steal", [port]) == []
            assert thief.ask("steal", [port]) == []


def test_only_the_listening_server_gets_connections(port: int) -> None:
    """The silent reservations are no part of what the kernel spreads connections over."""
    with closing(ReservedPorts([WantedPort(HOST, port)])):
        child = reserved.join(reserved.variable([Address(HOST, port)]))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port))
        with listening(port) as server:
            for _ in range(200):
                with socket.create_connection((HOST, port), 10):
                    server.accept()[0].close()
        child[0].close()


def test_one_port_for_two_servers_is_an_error_that_names_both(port: int) -> None:
    wanted = [WantedPort(HOST, port), WantedPort(HOST, port, "http_port")]
    with pytest.raises(Rejected, match=f"http_port: {port} is also the value of port: use another"):
        ReservedPorts(wanted)
    ReservedPorts(wanted[:1]).close()


def test_an_address_of_another_machine_is_not_a_taken_port(port: int) -> None:
    with pytest.raises(Rejected, match=r"^host: 192.0.2.1 is no address of this machine$"):
        ReservedPorts([WantedPort("192.0.2.1", port)])


def test_a_second_cluster_on_the_port_is_an_error(port: int) -> None:
    """It has the same user, so the kernel alone would let it share the port."""
    wanted = WantedPort(HOST, port, "http_port", "take another")
    with closing(ReservedPorts([wanted])):
        for _ in range(2):
            with pytest.raises(Rejected, match=f"http_port: {port} on {HOST} is taken.*another"):
                ReservedPorts([wanted])
            with listening(port), pytest.raises(Rejected, match="is taken"):
                ReservedPorts([wanted])
    with listening(port), pytest.raises(Rejected, match="is taken"):
        ReservedPorts([wanted])  # a process of a cluster whose supervisor was killed
    with listening(port, shared=False), pytest.raises(Rejected, match="is taken"):
        ReservedPorts([wanted])
    ReservedPorts([wanted]).close()


def test_a_port_whose_connections_have_just_ended_can_be_reserved(port: int) -> None:
    """A cluster starts again at once, although the kernel remembers the old one's connections."""
    for shared in (False, True):
        server = listening(port, shared=shared)
        with server, socket.create_connection((HOST, port), 10) as client:
            server.accept()[0].close()
            client.recv(1)
        ReservedPorts([WantedPort(HOST, port)]).close()


def test_a_public_port_is_reserved_on_both_loopback_addresses(
    thief: Thief, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """``localhost`` may mean ``::1``: another user there would be shown the clients' tokens."""
    if not is_free(port, "::1"):
        pytest.skip("no IPv6 here")
    with closing(ReservedPorts([WantedPort(HOST, port, public=True)])):
        assert thief.ask("steal", [port], (*OVERLAPPING, "::1")) == []
    assert not caplog.records
    caplog.set_level(logging.WARNING)
    with socket.create_server(("::1", port), family=socket.AF_INET6):
        ReservedPorts([WantedPort(HOST, port, public=True)]).close()
    assert f"another process has [::1]:{port}" in caplog.text


def _grpc(port: int) -> None:
    async def start() -> None:
        server = Server(ServerOptions(f"{HOST}:{port}"))
        try:
            await server.start()
        finally:
            await server.stop()

    asyncio.run(start())


def _http(port: int) -> None:
    async def start() -> None:
        async def app(scope: object, receive: object, send: object) -> None:
            raise AssertionError("no request was sent")

        server = HttpServer(app, Address(HOST, port), HttpLimits())
        await server.start()
        await server.stop()

    asyncio.run(start())


def _blocks(port: int) -> None:
    store = BlockStore(StoreLimits(budget=1 << 20))
    TransportListener(store, ListenerOptions(HOST, port, shared=False)).stop()


def _metrics(port: int) -> None:
    server = exposition.serve(CollectorRegistry(), HOST, port)
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("serve", [_grpc, _http, _blocks, _metrics])
def test_servers_take_their_reserved_port_from_no_living_process(
    serve: Callable[[int], None], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale process of the same user, such as an earlier worker, must not share the port."""
    with closing(ReservedPorts([WantedPort(HOST, port)])):
        with pytest.raises(Rejected, match=f"cannot listen on {HOST}:{port}"):
            serve(port)  # a process that the supervisor did not start
        for name, value in reserved.variable([Address(HOST, port)]).items():
            monkeypatch.setenv(name, value)
        serve(port)
        with listening(port), pytest.raises(Rejected, match=f"cannot listen on {HOST}:{port}"):
            serve(port)
        serve(port)
