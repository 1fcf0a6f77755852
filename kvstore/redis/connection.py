"""Connections to one Redis server: opened by the library ``redis``, whose errors become ours here.

The library connects, does the TLS handshake and logs in, and carries the rare commands. The bytes
of blocks go through the socket itself, since the library cannot receive into a given buffer.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import redis

from kvrelay.errors import DeadlineExceeded, Unavailable
from kvrelay.rpc.address import Address
from kvrelay.rpc.deadline import Deadline
from kvstore.redis.replies import ReplyReader
from kvstore.redis.settings import RedisSettings
from kvstore.wire.sockets import DeadlineSocket

CONNECT_SECONDS = 2.0

JOINED_BYTES = 64 << 10
"""Small buffers are sent as one TLS record rather than as one each."""


class RedisConnection:
    """A connection that is logged in. ``used``: it has answered before, so it may have timed out
    at the server while it was idle.
    """

    def __init__(self, address: Address, settings: RedisSettings, deadline: Deadline) -> None:
        self._opened = _open(address, settings, deadline)
        sock = self._opened._sock
        if sock is None:
            raise Unavailable(f"{address} hung up")
        self.sock: DeadlineSocket = (
            TlsSocket(sock) if isinstance(sock, ssl.SSLSocket) else DeadlineSocket(sock)
        )
        self.replies = ReplyReader(self.sock)
        self.used = False

    def send(self, commands: bytes) -> None:
        """Send commands, which are answered in their order."""
        self.sock.send([commands])

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


class TlsSocket(DeadlineSocket):
    """A ``DeadlineSocket`` over TLS. ``sock`` has done its handshake."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)

    def _wait_at_most(self, seconds: float | None) -> None:
        self._sock.settimeout(seconds)

    def _send_some(self, group: list[memoryview]) -> int:
        joined = 0
        size = 0
        while joined < len(group) and size + len(group[joined]) <= JOINED_BYTES:
            size += len(group[joined])
            joined += 1
        return self._sock.send(b"".join(group[:joined]) if joined > 1 else group[0])

    def _fill(self, group: list[memoryview]) -> int:
        return self._sock.recv_into(group[0])

    def cut(self) -> None:
        """The TLS session is not closed: another thread may be using it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)


@contextmanager
def library_client(
    address: Address, settings: RedisSettings, deadline: Deadline
) -> Iterator[redis.Redis]:
    """The library's commands on a connection of their own; each may take until ``deadline``."""
    deadline.check(f"to ask {address}")
    pool = _pool(address, settings, deadline)
    with _mapped_errors(address), redis.Redis(connection_pool=pool) as client:
        try:
            yield client
        finally:
            pool.disconnect()


class _LibraryConnection(Protocol):
    """The library closes the socket of a connection object that is garbage."""

    _sock: socket.socket | None

    def connect(self) -> None: ...


def _open(address: Address, settings: RedisSettings, deadline: Deadline) -> _LibraryConnection:
    deadline.check(f"to connect to {address}")
    # These timeouts are for connecting and logging in; ``DeadlineSocket`` sets its own later.
    limit = deadline.earlier(CONNECT_SECONDS)
    opened = cast(_LibraryConnection, _pool(address, settings, limit).make_connection())
    with _mapped_errors(address):
        opened.connect()
    return opened


def _pool(address: Address, settings: RedisSettings, deadline: Deadline) -> redis.ConnectionPool:
    options: dict[str, object] = {
        "username": settings.username,
        "password": settings.password,
        "db": settings.db,
        "protocol": 2,
        "driver_info": None,
        "socket_timeout": max(deadline.remaining(), 0.001),
        "socket_connect_timeout": max(deadline.earlier(CONNECT_SECONDS).remaining(), 0.001),
    }
    if address.port is None:
        options |= {"path": address.host, "connection_class": redis.UnixDomainSocketConnection}
    else:
        options |= {"host": address.host, "port": address.port}
    if settings.tls is not None:
        options |= {
            "connection_class": redis.SSLConnection,
            "ssl_ca_certs": settings.tls.ca,
            "ssl_certfile": settings.tls.cert,
            "ssl_keyfile": settings.tls.key,
            "ssl_min_version": ssl.TLSVersion.TLSv1_2,
        }
    return cast(Callable[..., redis.ConnectionPool], redis.ConnectionPool)(**options)


@contextmanager
def _mapped_errors(address: Address) -> Iterator[None]:
    try:
        yield
    except redis.TimeoutError as error:
        raise DeadlineExceeded(f"{address} did not answer in time: {error}") from error
    except (redis.RedisError, OSError) as error:
        refused = isinstance(error.__context__, ConnectionRefusedError)
        said = f"nothing listens at {address}" if refused else f"{address}: {error}"
        raise Unavailable(said) from error
