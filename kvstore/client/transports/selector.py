"""Which way the bytes go: the fastest that works, found when first needed and after a break.

Same host and same user: shared memory. Else a socket lane. Else, and whenever the others break,
gRPC streams. A way that broke is not tried again for a while, unless the store was started anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection

from kvrelay.errors import DeadlineExceeded, KvrelayError, Unavailable
from kvrelay.rpc.address import Address
from kvrelay.rpc.deadline import Deadline
from kvrelay.v1 import store_pb2 as pb
from kvstore.client.calls import StoreCalls
from kvstore.client.transports.base import Transport
from kvstore.client.transports.grpc_transport import GrpcTransport
from kvstore.client.transports.shared_memory import SharedMemoryTransport
from kvstore.client.transports.socket_transport import SocketTransport

log = logging.getLogger("kvrelay.store")

TRANSPORTS = ("shm", "lane", "grpc")
CONNECT_SECONDS = 2.0
AVOID_SECONDS = 5.0  # a way that broke
ABSENT_SECONDS = 30.0  # one that could not be gone in the first place


class TransportSelector:
    """Thread-safe. ``forced`` is the only way to begin with; those after it still help it out."""

    def __init__(self, address: str, calls: StoreCalls, forced: str | None) -> None:
        self._address = Address.parse(address)
        self._calls = calls
        self._forced = forced
        self._stream = GrpcTransport(calls)
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._offered: pb.GetTransportsResponse | None = None
        self._boot = b""
        self._made: dict[str, Transport] = {}
        self._avoid: dict[str, float] = {}
        self._said = ""
        self._emptied = 0  # how often all ways were given up
        self.breaks: dict[str, int] = {}
        self.used: dict[str, int] = {}

    def best(self, tried: Collection[str], deadline: Deadline) -> Transport:
        """The first way that is not among ``tried`` and can be gone; the last is always there.

        Raises when the store does not tell its ways in time.
        """
        way = self._find(tried, deadline)
        with self._lock:
            self.used[way.name] = self.used.get(way.name, 0) + 1
            if not tried and way.title != self._said:
                self._said = way.title
                log.info("kvrelay://%s: blocks go by %s", self._address, way.title)
        return way

    def broke(self, way: Transport, error: KvrelayError) -> None:
        """``way`` failed in the middle of a call."""
        with self._lock:
            self.breaks[way.name] = self.breaks.get(way.name, 0) + 1
            self._avoid[way.name] = time.monotonic() + AVOID_SECONDS
            self._offered = None
            if self._made.get(way.name) is way:
                del self._made[way.name]
        way.close(cut=False)
        log.warning("kvrelay://%s: %s broke: %s", self._address, way.title, error)

    def started(self, boot: bytes) -> None:
        """The store said which start of it this is: what is left of another is given up.

        Its memory too, which would stay taken for as long as it is mapped here.
        """
        if boot == self._boot:
            return
        with self._lock:
            self._boot = boot
            self._offered = None
            self._avoid = {}
            made = self._empty()
        for way in made.values():
            way.close(cut=False)

    def close(self) -> None:
        """Give up all connections; calls under way fail."""
        with self._lock:
            made = self._empty()
        for way in made.values():
            way.close()

    def _empty(self) -> dict[str, Transport]:
        made = self._made
        self._made = {}
        self._emptied += 1
        return made

    def _find(self, tried: Collection[str], deadline: Deadline) -> Transport:
        for name in TRANSPORTS[TRANSPORTS.index(self._forced or TRANSPORTS[0]) : -1]:
            if name in tried or self._avoided(name):
                continue
            if (way := self._made.get(name) or self._make(name, deadline)) is not None:
                return way
        return self._stream

    def _avoided(self, name: str) -> bool:
        return name != self._forced and self._avoid.get(name, 0.0) > time.monotonic()

    def _make(self, name: str, deadline: Deadline) -> Transport | None:
        """By one thread at a time; others wait for it, each no longer than it has time."""
        if not self._making.acquire(timeout=deadline.remaining()):
            raise DeadlineExceeded(f"another call is still looking for a way to {self._address}")
        try:
            if self._avoided(name):  # since we have waited
                return None
            return self._made.get(name) or self._attempt(name, self._offers(deadline), deadline)
        finally:
            self._making.release()

    def _offers(self, deadline: Deadline) -> pb.GetTransportsResponse:
        if (offered := self._offered) is None:
            offered = self._calls.ways(deadline)
            with self._lock:
                self._offered = offered
                if offered.boot != self._boot:
                    self._boot = offered.boot
                    self._avoid = {}
        return offered

    def _attempt(
        self, name: str, offered: pb.GetTransportsResponse, deadline: Deadline
    ) -> Transport | None:
        """``None`` for a way that cannot be gone. That the caller had no time tells nothing."""
        forced, emptied = name == self._forced, self._emptied
        limit = deadline if forced else deadline.earlier(CONNECT_SECONDS)
        makers: dict[str, Callable[[], Transport]] = {
            "shm": lambda: SharedMemoryTransport(offered, limit),
            "lane": lambda: SocketTransport(offered, self._address.host, self._calls, limit),
        }
        try:
            way = makers[name]()
        except (KvrelayError, OSError) as error:
            if forced or deadline.expired:
                raise Unavailable(f"way={name} cannot be gone: {error}") from error
            log.info("kvrelay://%s: no way %s: %s", self._address, name, error)
            with self._lock:
                self._avoid[name] = time.monotonic() + ABSENT_SECONDS
            return None
        with self._lock:
            if self._emptied == emptied:
                self._made[name] = way
                return way
        way.close()
        raise Unavailable("this store was closed, or started anew")
