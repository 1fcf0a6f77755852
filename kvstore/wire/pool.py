"""A pool of connections. Idle connections are kept; each concurrent call has its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kvrelay.errors import DeadlineExceeded, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvstore.wire.sockets import DeadlineSocket


class Pooled(Protocol):
    """A connection."""

    @property
    def sock(self) -> DeadlineSocket:
        """The socket that it sends and receives with."""

    def close(self) -> None:
        """Close the socket, and give back what belongs to the connection."""


C = TypeVar("C", bound=Pooled)


class ConnectionPool(Generic[C]):
    """Thread-safe. ``dial`` opens a connection before a deadline."""

    def __init__(self, dial: Callable[[Deadline], C]) -> None:
        self._dial = dial
        self._lock = threading.Lock()
        self._idle: list[C] = []
        self._used: set[C] = set()
        self._closed = False

    def acquire(self, deadline: Deadline) -> C:
        """A connection for the caller alone, who ends its use with ``release`` or ``discard``."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            if deadline.expired:
                raise DeadlineExceeded("no time is left to connect")
            connection = self._dial(deadline)
        with self._lock:
            if not self._closed:
                self._used.add(connection)
                return connection
        connection.close()
        raise Unavailable("this store was closed")

    def release(self, connection: C) -> None:
        """Keep a connection on which every request has been answered."""
        with self._lock:
            self._used.discard(connection)
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def discard(self, connection: C) -> None:
        """Close a connection that broke, or on which answers are still to come."""
        with self._lock:
            self._used.discard(connection)
        connection.close()

    def close_idle(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle = self._idle
            self._idle = []
        for connection in idle:
            connection.close()

    def close(self, cut: bool = True) -> None:
        """Refuse new calls. Calls under way fail, or end normally with ``cut=False``.

        The caller of each closes its connection.
        """
        with self._lock:
            self._closed = True
            used = list(self._used) if cut else []
        self.close_idle()
        for connection in used:
            connection.sock.cut()
