"""One server: its connections, and whether it is to be asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvrelay.errors import DeadlineExceeded, KvrelayError, Unavailable
from kvrelay.rpc.address import Address
from kvrelay.rpc.deadline import Deadline
from kvstore.circuit import CircuitBreaker
from kvstore.client.transports.connection import ConnectionPool
from kvstore.redis.connection import RedisConnection
from kvstore.redis.settings import RedisSettings


class ServerRefused(Unavailable):
    """A server answered with an error that asking again does not mend, ``NOPERM`` for one."""

    def __init__(self, address: Address, line: bytes) -> None:
        super().__init__(f"{address}: {line.lstrip(b'-')[:200].decode('utf-8', 'replace')}")


def was_idle(link: RedisConnection | None, error: KvrelayError) -> bool:
    """Whether ``link`` had been at rest, and may have ended long ago.

    All do when a server is started anew: that says nothing of a new connection.
    """
    ended = isinstance(error, Unavailable) and not isinstance(error, ServerRefused)
    return link is not None and link.used and ended


class RedisServer:
    """Thread-safe."""

    def __init__(self, address: Address, settings: RedisSettings) -> None:
        self.address = address
        self.circuit = CircuitBreaker()
        self._links: ConnectionPool[RedisConnection] = ConnectionPool(
            lambda deadline: RedisConnection(address, settings, deadline)
        )

    def take(self, deadline: Deadline, stall: float | None) -> RedisConnection:
        """A link for the caller alone, to be ended with ``give`` or ``failed``."""
        link = self._links.take(deadline)
        try:
            link.pipe.limit(deadline.remaining(), stall)
        except KvrelayError:
            self._links.drop(link)
            raise
        return link

    def give(self, link: RedisConnection) -> None:
        """Everything asked has been answered."""
        link.used = True
        self.circuit.answered()
        self._links.give(link)

    def drop(self, link: RedisConnection) -> None:
        """It was left in the middle, and that is not the server's fault."""
        self._links.drop(link)

    def failed(self, link: RedisConnection | None, error: KvrelayError) -> None:
        """``link`` broke, or there was none to be had. With an old one all at rest are ended."""
        if link is not None:
            self._links.drop(link)
        if was_idle(link, error):
            self._links.clear()
        elif isinstance(error, Unavailable | DeadlineExceeded):
            self.circuit.failed(isinstance(error, Unavailable))

    def close(self) -> None:
        """Calls under way fail."""
        self._links.close()


@contextmanager
def recorded(node: RedisServer) -> Iterator[None]:
    """For what is asked through the library."""
    try:
        yield
    except KvrelayError as error:
        node.failed(None, error)
        raise
    node.circuit.answered()
