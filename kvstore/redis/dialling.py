"""Connections of ``redis``, the client library, to one server: its errors become ours here.

It connects, makes safe and logs in; what is asked rarely goes through its commands. The bytes of
blocks do not, since it cannot receive into a buffer that is given (``kvstore.redis.connection``).
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import redis

from kvrelay.errors import DeadlineExceeded, Unavailable
from kvrelay.rpc.address import Address
from kvrelay.rpc.deadline import Deadline
from kvstore.redis.settings import RedisSettings

CONNECT_SECONDS = 2.0


@contextmanager
def mapped(address: Address) -> Iterator[None]:
    """The boundary where errors of the library become ours."""
    try:
        yield
    except redis.TimeoutError as error:
        raise DeadlineExceeded(f"{address} did not answer in time: {error}") from error
    except (redis.RedisError, OSError) as error:
        raise Unavailable(f"{address}: {error}") from error


class LibraryConnection(Protocol):
    """What is used of one; the library closes the socket of a connection that nobody holds."""

    _sock: socket.socket | None

    def connect(self) -> None: ...


def connection(address: Address, settings: RedisSettings, deadline: Deadline) -> LibraryConnection:
    """A connection of the library that is logged in."""
    deadline.check(f"to connect to {address}")
    # Its waits are those of connecting and logging in; what comes after has waits of its own.
    limit = deadline.earlier(CONNECT_SECONDS)
    made = cast(LibraryConnection, _pool(address, settings, limit).make_connection())
    with mapped(address):
        made.connect()
    return made


@contextmanager
def library_client(
    address: Address, settings: RedisSettings, deadline: Deadline
) -> Iterator[redis.Redis]:
    """The library's commands on a connection of their own, each of them with what time is left."""
    deadline.check(f"to ask {address}")
    with mapped(address), redis.Redis(connection_pool=_pool(address, settings, deadline)) as made:
        try:
            yield made
        finally:
            made.connection_pool.disconnect()


def _pool(address: Address, settings: RedisSettings, deadline: Deadline) -> redis.ConnectionPool:
    given: dict[str, object] = {
        "username": settings.username,
        "password": settings.password,
        "db": settings.db,
        "protocol": 2,
        "driver_info": None,
        "socket_timeout": max(deadline.remaining(), 0.001),
        "socket_connect_timeout": max(deadline.earlier(CONNECT_SECONDS).remaining(), 0.001),
    }
    if address.port is None:
        given |= {"path": address.host, "connection_class": redis.UnixDomainSocketConnection}
    else:
        given |= {"host": address.host, "port": address.port}
    if settings.tls is not None:
        given |= {
            "connection_class": redis.SSLConnection,
            "ssl_ca_certs": settings.tls.ca,
            "ssl_certfile": settings.tls.cert,
            "ssl_keyfile": settings.tls.key,
            "ssl_min_version": ssl.TLSVersion.TLSv1_2,
        }
    return cast(Callable[..., redis.ConnectionPool], redis.ConnectionPool)(**given)
