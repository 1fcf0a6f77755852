"""Sends the router's hints to its stores: one message an interval, and never two under way to one.

Nothing waits for a hint. A store that does not answer, or does not know hints, is left alone for a
while; so are stores of other kinds, such as Redis, for good.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import grpc

from kvrelay.errors import Rejected
from kvrelay.rpc.address import Address
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.security.policy import installed
from kvrelay.v1 import store_pb2, store_pb2_grpc
from router.queue.hints import HintQueue

log = logging.getLogger("kvrelay.router")
INTERVAL = 1.0
TIMEOUT = 1.0
PAUSE = 5.0  # after an error
LONG_PAUSE = 60.0  # for a store that does not know hints
SCHEMES = ("kvrelay", "kvrelays")


class HintSender:
    """The hints of ``hints`` go to each store among ``urls``, a list as workers take it."""

    def __init__(self, urls: str, hints: HintQueue, interval: float = INTERVAL) -> None:
        self._hints = hints
        self._interval = interval
        self._stores = [_HintedStore(address, hints) for address in _addresses(urls)]

    async def run(self) -> None:
        """Send until cancelled."""
        try:
            while self._stores:
                await asyncio.sleep(self._interval)
                if (message := self._hints.due(time.monotonic())) is not None:
                    for store in self._stores:
                        store.send(message)
        finally:
            for store in self._stores:
                await store.close()


class _HintedStore:
    def __init__(self, address: str, hints: HintQueue) -> None:
        self._address = address
        self._hints = hints
        self._channel = open_channel(address)
        self._stub = store_pb2_grpc.StoreServiceStub(self._channel)
        self._sending: asyncio.Task[None] | None = None
        self._quiet_until = 0.0

    def send(self, message: store_pb2.HintRequest) -> None:
        """Send a message, or drop it if the one before is still under way."""
        busy = self._sending is not None and not self._sending.done()
        if busy or time.monotonic() < self._quiet_until:
            self._hints.counts["dropped"] += len(message.hints)
            return
        self._sending = asyncio.create_task(self._send(message))

    async def close(self) -> None:
        """End the call under way and the connection."""
        if self._sending is not None:
            self._sending.cancel()
        await self._channel.close()

    async def _send(self, message: store_pb2.HintRequest) -> None:
        try:
            await self._stub.Hint(message, timeout=TIMEOUT)
        except grpc.aio.AioRpcError as error:
            self._hints.counts["dropped"] += len(message.hints)
            unknown = error.code() is grpc.StatusCode.UNIMPLEMENTED
            self._quiet_until = time.monotonic() + (LONG_PAUSE if unknown else PAUSE)
            log.debug("store %s took no hints: %s", self._address, error.details())
        else:
            self._hints.counts["sent"] += len(message.hints)


def _addresses(urls: str) -> Iterator[str]:
    """The addresses of kvrelay's own stores; ``Rejected`` if one is none, or may not be called."""
    for url in urls.split(","):
        try:
            parts = urlsplit(url.strip())
            if parts.scheme in SCHEMES:
                address = str(Address.parse(parts.netloc))
                installed().check_call(address)
                yield address
        except (ValueError, Rejected) as error:
            why = error.message if isinstance(error, Rejected) else error
            raise Rejected("store", f"{url.rpartition('@')[2]!r}: {why}") from error
