"""Connections without calls leave room for new clients, and cost no client its calls."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import grpc
import pytest

from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.health import is_serving
from kvrelay.rpc.security.policy import Security
from kvrelay.rpc.server.connections import Connection, ConnectionLimits, PeerCalls, superfluous
from kvrelay.rpc.server.server import Server, ServerOptions
from tests.fuzz.wire import PREFACE, SETTINGS, frame
from tests.secured import OWN_HOST

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the guard needs /proc")
OWN = f"{OWN_HOST}:0"
PLACES, SECONDS = 32, 30.0
LIMITS = ConnectionLimits(per_host=4, crowded=6, first_call_seconds=20.0)


class Waiting:
    """A stream that sends one message, and another when it is released."""

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def one(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        yield b"first"
        await self.released.wait()
        yield b"last"

    def register(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "One": grpc.unary_stream_rpc_method_handler(self.one)
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.S", handlers),))


@asynccontextmanager
async def serving(options: ServerOptions, waiting: Waiting | None = None) -> AsyncIterator[str]:
    server = Server(options)
    server.add("a.S", (waiting or Waiting()).register)
    address = await server.start()
    try:
        yield address
    finally:
        await server.stop()


@asynccontextmanager
async def idle(address: str, source: str | None = None) -> AsyncIterator[asyncio.StreamReader]:
    """An HTTP/2 connection that makes no call; its reader is past the server's first bytes."""
    host, _, port = address.rpartition(":")
    local = None if source is None else (source, 0)
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), local_addr=local)
    writer.write(PREFACE + frame(SETTINGS, 0, 0))
    with suppress(ConnectionError):
        await reader.read(1)
    try:
        yield reader
    finally:
        writer.close()


async def closed(reader: asyncio.StreamReader) -> None:
    """Wait until the server has closed the connection."""
    async with asyncio.timeout(SECONDS):
        with suppress(ConnectionError):
            await reader.read(-1)


async def test_idle_connections_keep_no_new_client_out() -> None:
    async with (
        serving(ServerOptions(OWN, max_connections=PLACES)) as address,
        AsyncExitStack() as stack,
    ):
        for _ in range(PLACES):
            await stack.enter_async_context(idle(address))
        async with open_channel(address) as channel:
            assert await is_serving(channel, Deadline.after(SECONDS), wait=True)


async def test_a_stream_outlives_the_idle_connections_of_its_own_address() -> None:
    waiting = Waiting()
    options = ServerOptions(OWN, max_connections=PLACES, max_connections_per_host=4)
    async with (
        serving(options, waiting) as address,
        open_channel(address) as channel,
        AsyncExitStack() as stack,
    ):
        ask: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/a.S/One")
        stream = ask(b"", timeout=2 * SECONDS)
        assert await stream.read() == b"first"
        readers = [await stack.enter_async_context(idle(address)) for _ in range(PLACES - 1)]
        await asyncio.wait(
            [asyncio.ensure_future(closed(one)) for one in readers[: PLACES - 8]], timeout=SECONDS
        )
        waiting.released.set()
        assert await stream.read() == b"last"


async def test_an_address_takes_no_more_than_its_bound() -> None:
    options = ServerOptions(OWN, max_connections=PLACES, max_connections_per_host=4)
    async with (
        serving(options) as address,
        open_channel(address) as channel,
        AsyncExitStack() as stack,
    ):
        assert await is_serving(channel, Deadline.after(SECONDS))
        readers = [await stack.enter_async_context(idle(address, "127.0.0.3")) for _ in range(12)]
        waits = [asyncio.ensure_future(closed(reader)) for reader in readers]
        done: set[asyncio.Task[None]] = set()
        while len(done) < 8:
            done, _ = await asyncio.wait(waits, timeout=0.1)
        assert len(done) == 8
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        for wait in waits:
            wait.cancel()


@pytest.mark.parametrize(
    ("listen", "connect"),
    [("127.0.0.1", "127.0.0.1"), ("[::1]", "[::1]"), ("[::]", "127.0.0.1"), ("[::]", "[::1]")],
)
async def test_a_connection_without_a_first_call_ends(listen: str, connect: str) -> None:
    """A connection that has made one stays: the server knows gRPC's name of its peer."""
    options = ServerOptions(
        f"{listen}:0", first_call_seconds=1.0, security=Security(allow_insecure=True)
    )
    async with serving(options) as bound:
        address = f"{connect}:{bound.rpartition(':')[2]}"
        async with open_channel(address) as channel, idle(address) as reader:
            assert await is_serving(channel, Deadline.after(SECONDS))
            await closed(reader)
            async with idle(address) as later:
                await closed(later)
            assert channel.get_state() is grpc.ChannelConnectivity.READY


async def test_grpc_ends_a_connection_that_is_idle_for_long() -> None:
    async with (
        serving(ServerOptions(idle_seconds=0.5)) as address,
        open_channel(address) as channel,
    ):
        assert await is_serving(channel, Deadline.after(SECONDS))
        async with asyncio.timeout(SECONDS):
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        assert await is_serving(channel, Deadline.after(SECONDS))


def connection(
    since: float, *, last: float = 0.0, opened: int = 0, host: str = "10.0.0.1"
) -> Connection:
    return Connection(round(since * 1000), host, since, PeerCalls(opened, last))


def test_unused_connections_end_first_then_the_longest_idle_then_the_newest() -> None:
    never, used, older = connection(95.0), connection(50.0, last=90.0), connection(50.5, last=60.0)
    streams = [connection(80.0 + n, last=99.0, opened=1) for n in range(4)]
    assert superfluous([never, used, older, *streams], LIMITS, 100.0) == [never, older, used]
    more = [*streams, connection(90.0, last=99.0, opened=1)]
    assert superfluous(more, LIMITS, 100.0) == [more[-1]]


def test_one_address_over_its_bound_costs_no_other_a_connection() -> None:
    ours = [connection(90.0 + n, host="10.0.0.2", last=95.0) for n in range(2)]
    theirs = [connection(99.0 + n / 10) for n in range(5)]
    assert superfluous([*ours, *theirs], LIMITS, 100.0) == [theirs[0]]


def test_a_nearly_full_server_makes_room_whatever_the_addresses() -> None:
    many = [connection(90.0 + n, host=f"10.0.0.{n}") for n in range(9)]
    assert superfluous(many, LIMITS, 100.0) == many[:3]


def test_nothing_ends_where_there_is_room() -> None:
    assert superfluous([connection(99.0), connection(1.0, last=2.0)], LIMITS, 100.0) == []
    assert superfluous([connection(79.0)], LIMITS, 100.0) == [connection(79.0)]
