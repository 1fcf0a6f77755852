"""Channels wait for a slow handshake, and soon find a server that came back."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest

from kvrelay.errors import Unavailable
from kvrelay.rpc.channel import ChannelOptions, open_channel, target
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.health import is_serving
from kvrelay.rpc.server.server import Server, ServerOptions
from tests.failures.proxy import Faults, Proxy
from tests.rpc.names import names


@pytest.mark.parametrize(
    ("address", "meant"),
    [("::1:50", "[::1]:50"), ("[::1]:50", "[::1]:50"), ("h:1", "h:1"), ("unix:/a:1", "unix:/a:1")],
)
def test_an_address_of_ipv6_keeps_its_port(address: str, meant: str) -> None:
    assert target(address) == meant


async def test_a_handshake_that_takes_its_time() -> None:
    server = Server()
    with Proxy(await server.start()) as proxy:
        proxy.down.faults = Faults(delay=0.4)  # a busy machine answers so late at times
        async with open_channel(proxy.address) as channel:
            assert await is_serving(channel, Deadline.after(20))
    await server.stop()


async def test_a_server_that_came_back_is_found_soon() -> None:
    server = Server()
    with Proxy(await server.start()) as proxy:
        async with open_channel(
            proxy.address, ChannelOptions(max_reconnect_seconds=0.5)
        ) as channel:
            assert await is_serving(channel, Deadline.after(20))
            proxy.down.faults = Faults(cut_after=0)
            proxy.cut()
            await asyncio.sleep(1.0)  # its attempts fail and grow rarer meanwhile
            proxy.heal()
            begun = time.monotonic()
            assert await is_serving(channel, Deadline.after(20), wait=True)
            assert time.monotonic() - begun < 5.0
    await server.stop()


async def test_a_name_that_means_another_address_now_is_looked_up_again() -> None:
    """A replaced container; by default gRPC would look its name up half a minute later."""
    server = Server(ServerOptions("127.0.0.1:0"))
    port = (await server.start()).rpartition(":")[2]
    async with (
        names("127.0.0.1") as (known, at),
        open_channel(f"dns://{at}/worker.test:{port}") as channel,
    ):
        assert await is_serving(channel, Deadline.after(20))
        await server.stop()
        with pytest.raises(Unavailable):
            await is_serving(channel, Deadline.after(20))
        moved = Server(ServerOptions(f"127.0.0.2:{port}"))
        await moved.start()
        known.host = "127.0.0.2"
        assert await is_serving(channel, Deadline.after(15), wait=True)
    await moved.stop()


class Silent:
    """Answers once, then never; ``left`` counts cancelled calls."""

    def __init__(self) -> None:
        self.left = asyncio.Semaphore(0)

    async def one(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        yield b"x"
        try:
            await asyncio.Event().wait()
        finally:
            self.left.release()

    def register(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "One": grpc.unary_stream_rpc_method_handler(self.one)
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.S", handlers),))


@asynccontextmanager
async def asking(
    service: Silent, theirs: ServerOptions, mine: ChannelOptions
) -> AsyncIterator[tuple[Proxy, grpc.aio.UnaryStreamMultiCallable[bytes, bytes]]]:
    """The method of that server, behind a proxy."""
    server = Server(theirs)
    server.add("a.S", service.register)
    with Proxy(await server.start()) as proxy:
        async with open_channel(proxy.address, mine) as channel:
            yield proxy, channel.unary_stream("/a.S/One")
    await server.stop()


QUICK, NEVER = 1.0, 600.0  # keepalive of who is to notice, and of the other


@pytest.mark.parametrize("notices", ["client", "server"])
async def test_a_connection_that_fell_silent_is_given_up(notices: str) -> None:
    """By keepalive, long before the deadline of the call."""
    service = Silent()
    mine, theirs = (QUICK, NEVER) if notices == "client" else (NEVER, QUICK)
    async with asking(
        service,
        ServerOptions(keepalive_seconds=theirs, ping_seconds=theirs),
        ChannelOptions(keepalive_seconds=mine, ping_seconds=mine),
    ) as (proxy, ask):
        call = ask(b"", timeout=40)
        assert await call.read() == b"x"
        proxy.up.hold()
        proxy.down.hold()
        if notices == "client":
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await call.read()
            assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        else:
            await asyncio.wait_for(service.left.acquire(), 30)


@pytest.mark.parametrize("made", [ChannelOptions(), ServerOptions()], ids=["client", "server"])
def test_a_ping_has_a_minute(made: ChannelOptions | ServerOptions) -> None:
    """A dead machine is detected sooner, but by other means."""
    arguments = dict(made.arguments())
    assert arguments["grpc.http2.ping_timeout_ms"] == 60_000
    assert arguments["grpc.keepalive_timeout_ms"] <= 20_000


@pytest.mark.slow
async def test_a_slow_upload_is_no_silence() -> None:
    """Pings wait behind it, longer than a kernel may take to acknowledge data."""
    service, seconds = Silent(), 4.0
    async with asking(
        service,
        ServerOptions(keepalive_seconds=QUICK, keepalive_timeout_seconds=seconds),
        ChannelOptions(keepalive_seconds=QUICK, keepalive_timeout_seconds=seconds),
    ) as (proxy, ask):
        proxy.up.faults = Faults(rate=200_000)
        call = ask(bytes(2_000_000), timeout=40)
        assert await call.read() == b"x"
        call.cancel()


@pytest.mark.skipif(sys.platform != "linux", reason="what gRPC sets there is an option of Linux")
async def test_a_machine_that_died_is_noticed_by_the_kernel() -> None:
    """The kernel's limit for unacknowledged data does not depend on the ping's."""
    server = Server(ServerOptions(keepalive_timeout_seconds=7.0))
    async with open_channel(
        await server.start(), ChannelOptions(keepalive_timeout_seconds=3.0)
    ) as channel:
        assert await is_serving(channel, Deadline.after(20))
        assert {3000, 7000} <= user_timeouts()
    await server.stop()


def user_timeouts() -> set[int]:
    """TCP user timeouts of all sockets of this process, in milliseconds."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            found.add(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return found
