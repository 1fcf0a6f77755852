"""A connection that is answered late is waited for, and one that came back is found soon."""

from __future__ import annotations

import asyncio
import time

import pytest

from rpc.channel import ChannelOptions, open_channel, target
from rpc.deadline import Deadline
from rpc.health import is_serving
from rpc.server import Server
from tests.failures.proxy import Faults, Proxy


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
