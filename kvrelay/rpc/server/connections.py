"""Keeps room for new connections: a bound for each peer address, an end to unused connections.

gRPC refuses every new connection once a server has its one bound of them; a bound for each address
was asked for in grpc/grpc issue 12737 and never came. So a guard looks twice a second at the
sockets of its own process (on Linux) and shuts down:

- connections that made no call within some seconds of their start;
- while an address has too many, or the server is nearly full, connections without an open call:
  first those that never made one, then the longest unused;
- the newest connections of an address that still has too many.

gRPC's channels connect again when they need to.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from kvrelay.rpc.address import Address

log = logging.getLogger("kvrelay.rpc")

OPEN_FILES = Path("/proc/self/fd")
LOOK_SECONDS = 0.5
TURN = 32  # sockets in one turn of the event loop
WARN_SECONDS = 60.0
NETWORK_BITS = 64  # of an IPv6 address: one machine may use every address of its network

T = TypeVar("T")
Peer = tuple[IPv4Address | IPv6Address, int]
UNKNOWN: Peer = IPv4Address(0), 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """``crowded``: connections at which the server makes room for new ones."""

    per_host: int
    crowded: int
    first_call_seconds: float


@dataclass(slots=True)
class PeerCalls:
    """The calls of one peer, an address with its port; ``last`` is 0 before the first call."""

    open: int = 0
    last: float = 0.0


@dataclass(frozen=True, slots=True)
class Connection:
    """An accepted connection; ``host`` is what ``per_host`` counts."""

    inode: int
    host: str
    since: float
    calls: PeerCalls


def superfluous(
    connections: Sequence[Connection], limits: ConnectionLimits, now: float
) -> list[Connection]:
    """The connections to shut down. Pure."""
    of_host, total = Counter(one.host for one in connections), len(connections)
    found, kept = [], []
    for one in sorted(connections, key=lambda one: (one.calls.last, one.since)):
        unused = not one.calls.last and now - one.since > limits.first_call_seconds
        crowded = of_host[one.host] > limits.per_host or total > limits.crowded
        if one.calls.open or not (unused or crowded):
            kept.append(one)
            continue
        found.append(one)
        of_host[one.host] -= 1
        total -= 1
    for one in sorted(kept, key=lambda one: one.since, reverse=True):
        if of_host[one.host] > limits.per_host:
            found.append(one)
            of_host[one.host] -= 1
    return found


class ConnectionGuard:
    """Guards the connections that a server accepts at one address."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._connections: dict[int, Connection | None] = {}  # by inode; None: another socket
        self._calls: dict[Peer, PeerCalls] = {}
        self._warned = -WARN_SECONDS
        self._task: asyncio.Task[None] | None = None

    def start(self, address: Address) -> None:
        """Guard until ``stop``; does nothing for a Unix socket, and on other systems."""
        if address.port is not None and sys.platform == "linux":
            self._task = asyncio.create_task(self._run(address), name="connections")
            self._task.add_done_callback(_report)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    @contextmanager
    def counted(self, peer: str) -> Iterator[None]:
        """Count a call of ``peer``, as gRPC names it, as open inside this block."""
        if self._task is None:
            yield
            return
        calls = self._calls.setdefault(_peer(peer), PeerCalls())
        calls.open += 1
        calls.last = time.monotonic()
        try:
            yield
        finally:
            calls.open -= 1
            calls.last = time.monotonic()

    async def _run(self, address: Address) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now, files, before = time.monotonic(), _sockets(), self._connections
            self._connections = {inode: before[inode] for inode in files if inode in before}
            async for inode in _in_turns([one for one in files if one not in before]):
                self._connections[inode] = self._accepted(address, files[inode], inode, now)
            accepted = [one for one in self._connections.values() if one is not None]
            self._forget_calls(accepted, now)
            ended = superfluous(accepted, self._limits, now)
            async for one in _in_turns(ended):
                _shut_down(files[one.inode], one.inode)
            if ended and now - self._warned >= WARN_SECONDS:
                self._warned = now
                hosts = Counter(one.host for one in ended).most_common(5)
                shown = ", ".join(f"{count} of {host}" for host, count in hosts)
                log.warning("closed unused connections: %s; %d were open", shown, len(accepted))

    def _accepted(self, bound: Address, file: int, inode: int, now: float) -> Connection | None:
        """The connection of an open file; ``None`` if the server did not accept it."""
        with suppress(OSError), _opened(file, inode) as one:
            match one.getsockname():
                case str(host), port, *_ if port == bound.port and _listens(bound.host, host):
                    host, port, *_ = one.getpeername()
                    peer = _address(host), port
                    calls = self._calls.setdefault(peer, PeerCalls())
                    return Connection(inode, _network(peer[0]), now, calls)
        return None

    def _forget_calls(self, accepted: Sequence[Connection], now: float) -> None:
        """Drop the calls of connections that have ended."""
        current = {id(one.calls) for one in accepted}
        self._calls = {
            peer: calls
            for peer, calls in self._calls.items()
            if id(calls) in current or calls.open or now - calls.last < 2 * LOOK_SECONDS
        }


async def _in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """The items, with turns for the other tasks of the event loop between them."""
    for count, item in enumerate(items, 1):
        yield item
        if count % TURN == 0:
            await asyncio.sleep(0)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        log.error("connections are no longer bounded for each address", exc_info=task.exception())


@lru_cache(maxsize=4096)
def _peer(name: str) -> Peer:
    """The peer of gRPC's name, such as ``ipv4:10.0.0.1:5000`` or ``ipv6:%5B::1%5D:5000``."""
    host, _, port = unquote(name).partition(":")[2].rpartition(":")
    try:
        return _address(host.strip("[]")), int(port)
    except ValueError:
        return UNKNOWN


def network_of_peer(name: str) -> str:
    """The network of a client by gRPC's name for it; empty for a Unix socket."""
    address, port = _peer(name)
    return _network(address) if port else ""


def network_of(host: str) -> str:
    """The network of a client's address; empty for what is none."""
    try:
        return _network(_address(host))
    except ValueError:
        return ""


def _address(host: str) -> IPv4Address | IPv6Address:
    """Without a scope; an IPv4 address that is mapped to IPv6 as itself."""
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _network(address: IPv4Address | IPv6Address) -> str:
    if isinstance(address, IPv4Address):
        return str(address)
    return str(ip_network((address, NETWORK_BITS), strict=False))


def _listens(bound: str, host: str) -> bool:
    """Whether a server bound to ``bound`` accepts connections to ``host``."""
    try:
        wanted = ip_address(bound)
    except ValueError:  # a name
        return True
    return wanted.is_unspecified or wanted == _address(host)


def _sockets() -> dict[int, int]:
    """The open sockets of this process: inodes and file descriptors."""
    found = {}
    for name in os.listdir(OPEN_FILES):
        with suppress(OSError):  # closed since it was listed
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def _opened(file: int, inode: int) -> socket.socket:
    """The socket under a new descriptor; ``OSError`` if the old one is another file by now."""
    copy = os.dup(file)
    try:
        if os.fstat(copy).st_ino != inode:
            raise OSError(errno.EBADF, "closed")
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _shut_down(file: int, inode: int) -> None:
    """Shut a connection down; its owner sees that it has ended."""
    with suppress(OSError), _opened(file, inode) as one:
        one.shutdown(socket.SHUT_RDWR)
