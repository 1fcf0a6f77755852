"""Announces this worker to routers, repeatedly: an announcement expires after ``TTL_SECONDS``."""

from __future__ import annotations

import asyncio
import logging
import socket

import grpc

from kvrelay.errors import Rejected
from kvrelay.rpc.address import Address
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.security.policy import installed
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import router_pb2, router_pb2_grpc

log = logging.getLogger(__name__)
TTL_SECONDS = 10.0
EVERY_SECONDS = TTL_SECONDS / 4
LEAVE_SECONDS = 5.0  # for a router that does not answer
EVERY_ADDRESS = ("0.0.0.0", "::")


def advertised(bound: str, advertise: str | None) -> str:
    """The address to announce; ``Rejected`` if other machines could not use it."""
    address = check_address("advertise", advertise or bound)
    if not address.port or address.host in EVERY_ADDRESS:
        raise Rejected("advertise", f"{address} is not the address of one machine: give HOST:PORT")
    return str(address)


def label(host: str, port: int, advertise: str | None) -> str:
    """The ``worker`` label of this worker's metrics: the address at which a router reaches it.

    That is ``advertise`` if given, else ``host:port``. A worker that listens on every address, as
    in a container, has the address of its host name, or the name itself if it resolves to a
    loopback address or not at all.
    """
    if advertise is not None or host not in EVERY_ADDRESS:
        return advertise or str(Address(host, port))
    name = socket.gethostname()
    try:
        found = Address(socket.gethostbyname(name), port)
    except OSError:
        return str(Address(name, port))
    return str(Address(name, port) if found.local else found)


def check_address(field: str, text: str) -> Address:
    """The address in ``text``; ``Rejected`` for ``field``."""
    try:
        return Address.parse(text)
    except Rejected as error:
        raise Rejected(field, error.message) from error


class Announcer:
    """Announces from ``begin`` to ``end``. Without routers it does nothing."""

    def __init__(self, routers: tuple[str, ...], advertise: str | None) -> None:
        self._routers = routers
        self._advertise = advertise
        self._tasks: list[asyncio.Task[None]] = []
        self._address: str | None = None  # that was announced
        for router in routers:
            check_address("router", router)
            installed().check_call(router)

    def begin(self, bound: str) -> None:
        """Announce ``bound``, or the address to advertise instead."""
        if self._routers:
            self._address = address = advertised(bound, self._advertise)
            self._tasks = [
                asyncio.create_task(_announce(router, address)) for router in self._routers
            ]

    def end(self) -> None:
        """Stop: routers forget this worker once its last announcement expires."""
        for task in self._tasks:
            task.cancel()

    async def leave(self) -> None:
        """Stop, and have the routers forget this worker: to them it has not died."""
        self.end()
        if self._address is not None:
            await asyncio.gather(*(_leave(router, self._address) for router in self._routers))


async def _leave(router: str, address: str) -> None:
    request = router_pb2.AnnounceRequest(address=address, leaving=True)
    async with open_channel(router) as channel:
        try:
            await router_pb2_grpc.RouterServiceStub(channel).Announce(
                request, timeout=LEAVE_SECONDS
            )
        except grpc.RpcError as error:
            log.info("the router at %s was not told: %s", router, from_rpc_error(error))


async def _announce(router: str, address: str) -> None:
    request = router_pb2.AnnounceRequest(address=address, ttl_seconds=TTL_SECONDS)
    last = None
    async with open_channel(router) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        while True:
            try:
                answer = await stub.Announce(request, timeout=EVERY_SECONDS)
                news = answer.reason or "it uses this worker"
            except grpc.RpcError as error:
                news = str(from_rpc_error(error))
            if news != last:
                log.info("announced %s to the router at %s: %s", address, router, news)
                last = news
            await asyncio.sleep(EVERY_SECONDS)
