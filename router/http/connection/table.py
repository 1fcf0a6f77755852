"""How many connections there are; an idle one makes room for a new one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Bounds of connections and requests; times in seconds, sizes in bytes."""

    connections: int = 2048
    connections_per_host: int = 1024
    head_bytes: int = 32 << 10
    head_seconds: float = 10.0  # from the first byte, or the connection's start, to a whole head
    idle_seconds: float = 75.0  # between two requests
    unread_bytes: int = 64 << 20  # dropped of the rest of a request that has its answer
    body_bytes: int = 8 << 20
    body_seconds: float = 30.0  # also for the unread bytes
    stuck_seconds: float = 30.0  # a response that the client does not read ends after that


class CountedConnection(Protocol):
    """A connection of a client at ``host``; ``shakes_hands``: it does not speak HTTP yet."""

    host: str
    shakes_hands: bool

    @property
    def writes(self) -> bool: ...

    def abort(self) -> None: ...


class ConnectionTable:
    """The open connections of a server; ``idle`` ones are ordered, longest idle first."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self._hosts = Counter[str]()
        self._idle: dict[CountedConnection, None] = {}

    @property
    def open(self) -> int:
        """Number of open connections."""
        return self._hosts.total()

    def enter(self, connection: CountedConnection) -> None:
        """Count a new connection. If there are too many, the one longest idle is closed.

        The last are those whose clients have not read all of an answer.
        """
        host, limits = connection.host, self.limits
        self._hosts[host] += 1
        full = self.open > limits.connections
        if full or self._hosts[host] > limits.connections_per_host:
            idle = [one for one in self._idle if full or one.host == host]
            silent = (one for one in idle if not one.writes)
            evicted = next(silent, idle[0] if idle else connection)
            self._idle.pop(evicted, None)  # it is still open: the next one evicts another
            evicted.abort()
            if evicted is connection:
                return
        self._idle[connection] = None

    def leave(self, connection: CountedConnection) -> None:
        self._idle.pop(connection, None)
        self._hosts[connection.host] -= 1
        if not self._hosts[connection.host]:
            del self._hosts[connection.host]

    def abort_handshakes(self) -> None:
        """Close the connections that have not begun to speak HTTP."""
        for one in [one for one in self._idle if one.shakes_hands]:
            one.abort()

    def busy(self, connection: CountedConnection) -> None:
        """A request has begun on the connection."""
        self._idle.pop(connection, None)

    def rest(self, connection: CountedConnection) -> None:
        """It may make room for another one."""
        self._idle[connection] = None
