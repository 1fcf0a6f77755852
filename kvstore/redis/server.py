"""One Redis server: its connections and its circuit breaker."""

from __future__ import annotations

from kvrelay.errors import DeadlineExceeded, KvrelayError, Unavailable
from kvrelay.rpc.address import Address
from kvrelay.rpc.deadline import Deadline
from kvstore.breaker import CircuitBreaker
from kvstore.redis.connection import RedisConnection
from kvstore.redis.settings import RedisSettings
from kvstore.wire.pool import ConnectionPool


class ServerRefused(Unavailable):
    """A server answered with an error that a retry does not mend, ``NOPERM`` for example."""

    def __init__(self, address: Address, line: bytes) -> None:
        super().__init__(f"{address}: {line.lstrip(b'-')[:200].decode('utf-8', 'replace')}")


def was_stale(connection: RedisConnection | None, error: KvrelayError) -> bool:
    """Whether ``error`` only says that an idle connection had ended before this call.

    All of them have after a restart of the server: that says nothing of a new connection.
    """
    ended = isinstance(error, Unavailable) and not isinstance(error, ServerRefused)
    return connection is not None and connection.used and ended


class RedisServer:
    """Thread-safe."""

    def __init__(self, address: Address, settings: RedisSettings) -> None:
        self.address = address
        self.breaker = CircuitBreaker(str(address))
        self._pool: ConnectionPool[RedisConnection] = ConnectionPool(
            lambda deadline: RedisConnection(address, settings, deadline)
        )

    def acquire(self, deadline: Deadline, stall: float | None) -> RedisConnection:
        """A connection for the caller alone: end its use with ``release``, ``discard``, ``failed``.

        Its operations end by ``deadline``, and earlier when no byte moves for ``stall`` seconds.
        """
        connection = self._pool.acquire(deadline)
        try:
            connection.sock.limit(deadline.remaining(), stall)
        except KvrelayError:
            self._pool.discard(connection)
            raise
        return connection

    def release(self, connection: RedisConnection) -> None:
        """Every command has been answered."""
        connection.used = True
        self.breaker.answered()
        self._pool.release(connection)

    def discard(self, connection: RedisConnection) -> None:
        """Answers are still to come, and that is not the server's fault."""
        self._pool.discard(connection)

    def failed(self, connection: RedisConnection | None, error: KvrelayError) -> None:
        """``connection`` broke, or none could be opened. Stale ones end all idle connections."""
        if connection is not None:
            self._pool.discard(connection)
        if was_stale(connection, error):
            self._pool.close_idle()
        elif isinstance(error, Unavailable | DeadlineExceeded):
            self.breaker.failed(error)

    def close(self) -> None:
        """Calls under way fail."""
        self._pool.close()
