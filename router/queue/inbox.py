"""Receives requests: a message is read from its client only when there is memory for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from kvrelay.errors import DeadlineExceeded
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.security.identity import Tenant
from kvrelay.v1 import router_pb2
from router.queue.semaphore import FairSemaphore

INBOX_BYTES = 128 << 20
SHARES = 4  # a tenant, or else a network, may have one of so many
SMALL_BYTES = 64 << 10  # a body of up to so many has arrived whole before it takes room here
SMALL_INBOX_BYTES = 32 << 20  # for all such bodies, beside INBOX_BYTES
COPIES = 3  # of an HTTP body while it is read: its bytes, its values and its message
READ_SECONDS = 10.0  # then a message that has not arrived makes room for others that wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Inbound:
    """A message, and what the door adds to it.

    ``fills``: ``max_tokens`` becomes as many as the largest worker holds. ``cache_salt``: only
    requests of the tenant with the same one share cached blocks. ``regenerates``: the client has
    what is asked for up to a place. ``received_at``: when its request was, by ``time.monotonic``.
    """

    message: router_pb2.GenerateRequest
    fills: bool = False
    cache_salt: str = ""
    regenerates: bool = False
    received_at: float = field(default_factory=time.monotonic)


Read: TypeAlias = Callable[[], Awaitable[Inbound]]


def reading(inbound: Inbound) -> Read:
    """Reads a message that is here already."""

    async def read() -> Inbound:
        return inbound

    return read


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sends a message, from which network. ``nbytes``: the size of an HTTP body."""

    tenant: Tenant
    network: str = ""
    nbytes: int | None = None

    @property
    def holder(self) -> Tenant:
        """Whose share the message takes: without a tenant's name the network's."""
        if self.tenant.name or not self.network:
            return self.tenant
        return replace(self.tenant, name=f"from {self.network}")


class Inbox:
    """The messages of all requests that are not accepted yet.

    A gRPC message counts as ``largest`` until it has been read, an HTTP body as ``COPIES`` of its
    size.
    """

    def __init__(self, largest: int) -> None:
        limit = max(INBOX_BYTES, COPIES * largest)
        self.semaphore = FairSemaphore(limit, limit // SHARES)
        self.small = FairSemaphore(SMALL_INBOX_BYTES, SMALL_INBOX_BYTES // SHARES)
        self._largest = largest

    @asynccontextmanager
    async def received(
        self, read: Read, sender: Sender, deadline: Deadline
    ) -> AsyncIterator[Inbound]:
        """Read a message. Its bytes count inside; keep no reference to it afterwards."""
        holder, nbytes = sender.holder, sender.nbytes
        held = self._largest if nbytes is None else max(COPIES * nbytes, 1)
        semaphore = self.small if nbytes is not None and nbytes <= SMALL_BYTES else self.semaphore
        async with deadline.limit("to receive the request"):
            await semaphore.acquire(holder, held)
        try:
            async with deadline.limit("to receive the request"):
                inbound = await _read(read, semaphore)
            unused = max(0, held - inbound.message.ByteSize())
            held -= unused
            semaphore.release(holder, unused)
            yield inbound
        finally:
            semaphore.release(holder, held)


async def _read(read: Read, semaphore: FairSemaphore) -> Inbound:
    reading = asyncio.ensure_future(read())
    try:
        while not (await asyncio.wait((reading,), timeout=READ_SECONDS))[0]:
            if semaphore.waiting:
                raise DeadlineExceeded(
                    f"its message was not read within {READ_SECONDS:g} s, and other requests"
                    " wait for its place"
                )
        return reading.result()
    finally:
        reading.cancel()
        del reading  # an error that it raised has this frame
