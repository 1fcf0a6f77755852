"""The choice of a transport: the fastest that works, at first use and again after a failure.

Shared memory on the same host for the same user, else a TCP socket, else gRPC streams, which also
replace the others when these fail. A transport that failed is avoided for a while, unless the
store was restarted.
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
from kvstore.device import MemoryRegistrar

log = logging.getLogger("kvrelay.store")

TRANSPORTS = ("shm", "socket", "grpc")
CONNECT_SECONDS = 2.0
FAILED_SECONDS = 5.0
"""How long a transport is avoided that failed during a call."""

UNAVAILABLE_SECONDS = 30.0
"""How long a transport is avoided that could not be opened."""


class TransportSelector:
    """Thread-safe. Begins with the transport ``forced``; those after it replace it if it fails."""

    def __init__(
        self,
        address: str,
        calls: StoreCalls,
        forced: str | None,
        registrar: MemoryRegistrar | None = None,
    ) -> None:
        self._address = Address.parse(address)
        self._calls = calls
        self._forced = forced
        self._registrar = registrar
        self._grpc = GrpcTransport(calls)
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._offered: pb.GetTransportsResponse | None = None
        self._boot = b""
        self._open: dict[str, Transport] = {}
        self._avoid_until: dict[str, float] = {}
        self._logged = ""
        self._reasons: dict[str, str] = {}  # why transports are unavailable, as logged
        self._resets = 0  # how often every transport was closed
        self.breaks: dict[str, int] = {}
        self.used: dict[str, int] = {}

    def choose(self, tried: Collection[str], deadline: Deadline) -> Transport:
        """The first available transport that is not among ``tried``; gRPC always is available.

        Raises if the store does not say in time which transports it offers.
        """
        chosen = self._find(tried, deadline)
        with self._lock:
            self.used[chosen.name] = self.used.get(chosen.name, 0) + 1
            if not tried and chosen.title != self._logged:
                self._logged = chosen.title
                log.info("kvrelay://%s: blocks go by %s", self._address, chosen.title)
        return chosen

    def failed(self, transport: Transport, error: KvrelayError) -> None:
        """``transport`` failed during a call."""
        name = transport.name
        with self._lock:
            self.breaks[name] = self.breaks.get(name, 0) + 1
            self._avoid_until[name] = time.monotonic() + FAILED_SECONDS
            self._offered = None
            if self._open.get(name) is transport:
                del self._open[name]
        transport.close(cut=False)
        log.warning("kvrelay://%s: %s failed: %s", self._address, transport.title, error)

    def seen_boot(self, boot: bytes) -> None:
        """The store answered as its start ``boot``: transports to another start are closed.

        That unmaps the arena of that start, which otherwise would keep its memory.
        """
        if boot == self._boot:
            return
        with self._lock:
            self._boot = boot
            self._offered = None
            self._avoid_until = {}
            closing = self._reset()
        for transport in closing:
            transport.close(cut=False)

    def close(self) -> None:
        """Close every connection; calls under way fail."""
        with self._lock:
            closing = self._reset()
        for transport in closing:
            transport.close()

    def _reset(self) -> list[Transport]:
        closing = list(self._open.values())
        self._open = {}
        self._resets += 1
        return closing

    def _find(self, tried: Collection[str], deadline: Deadline) -> Transport:
        for name in TRANSPORTS[TRANSPORTS.index(self._forced or TRANSPORTS[0]) : -1]:
            if name in tried or self._is_avoided(name):
                continue
            if (chosen := self._open.get(name) or self._make(name, deadline)) is not None:
                return chosen
        return self._grpc

    def _is_avoided(self, name: str) -> bool:
        return name != self._forced and self._avoid_until.get(name, 0.0) > time.monotonic()

    def _make(self, name: str, deadline: Deadline) -> Transport | None:
        """One thread at a time opens a transport; the others wait until their deadlines."""
        if not self._opening.acquire(timeout=deadline.remaining()):
            raise DeadlineExceeded(f"another call is still opening a transport to {self._address}")
        try:
            if self._is_avoided(name):  # since this thread waited
                return None
            return self._open.get(name) or self._attempt(name, self._offers(deadline), deadline)
        finally:
            self._opening.release()

    def _offers(self, deadline: Deadline) -> pb.GetTransportsResponse:
        if (offered := self._offered) is None:
            offered = self._calls.transports(deadline)
            with self._lock:
                self._offered = offered
                if offered.boot != self._boot:
                    self._boot = offered.boot
                    self._avoid_until = {}
        return offered

    def _attempt(
        self, name: str, offered: pb.GetTransportsResponse, deadline: Deadline
    ) -> Transport | None:
        """``None`` if it is unavailable. An expired deadline says nothing about the transport."""
        forced = name == self._forced
        resets = self._resets
        limit = deadline if forced else deadline.earlier(CONNECT_SECONDS)
        makers: dict[str, Callable[[], Transport]] = {
            "shm": lambda: SharedMemoryTransport(offered, limit, self._registrar),
            "socket": lambda: SocketTransport(offered, self._address.host, self._calls, limit),
        }
        try:
            made = makers[name]()
        except (KvrelayError, OSError) as error:
            if forced or deadline.expired:
                raise Unavailable(f"transport {name} is unavailable: {error}") from error
            if self._reasons.get(name) != (reason := str(error)):
                log.info(
                    "kvrelay://%s: transport %s is unavailable: %s", self._address, name, error
                )
            with self._lock:
                self._reasons[name] = reason
                self._avoid_until[name] = time.monotonic() + UNAVAILABLE_SECONDS
            return None
        with self._lock:
            if self._resets == resets:
                self._open[name] = made
                return made
        made.close()
        raise Unavailable("this store was closed, or restarted")
