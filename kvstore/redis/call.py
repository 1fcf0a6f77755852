"""One call of a Redis store: the servers that may answer, its connections to them, the retries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvrelay.errors import KvrelayError, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvstore.redis.connection import RedisConnection
from kvstore.redis.server import RedisServer, ServerRefused, was_stale
from kvstore.redis.topology import Topology

ROUNDS = 4
"""Attempts of a call after a server failed or a key was on another server."""

CHUNK = 4096
"""Names in one round trip."""

STALL_SECONDS = 2.0
"""In a cluster, how long a server may send nothing; at most half of the time left."""

REDIRECTS = frozenset(
    ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "LOADING", "READONLY")
)
"""Error codes of a server that does not have the key, or not now."""

WRONG_TYPE = "WRONGTYPE"
"""The error code for a key that holds no string, so no block."""


def error_code(line: bytes) -> str | None:
    """The first word of an error reply; ``None`` for any other reply."""
    return line[1:].split(b" ", 1)[0].decode("ascii", "replace") if line[:1] == b"-" else None


def is_redirect(line: bytes) -> bool:
    """Whether a reply says that the server does not have the key, or not now."""
    return line[:1] == b"-" and error_code(line) in REDIRECTS


class RedisCall:
    """A context. Connections on which answers are still to come at its end are closed."""

    def __init__(self, topology: Topology, deadline: Deadline, cluster: bool) -> None:
        self.topology = topology
        self.deadline = deadline
        self.error: KvrelayError | None = None
        self._cluster = cluster
        self._usable: dict[RedisServer, bool] = {}
        self._connections: dict[RedisServer, RedisConnection] = {}
        self._busy: set[RedisServer] = set()
        self._changed = False  # a server failed in this round

    def __enter__(self) -> RedisCall:
        self.deadline.check("to ask the store")  # which is no failure of a server
        self.topology.prepare(self.deadline)
        return self

    def __exit__(self, *_: object) -> None:
        for server, connection in self._connections.items():
            server.discard(connection) if server in self._busy else server.release(connection)
        self._connections.clear()
        self._busy.clear()

    def place(self, name: bytes) -> tuple[RedisServer, bytes] | None:
        """The server and the key of a block; ``None`` if no server of its places is usable."""
        return self.topology.place(name, self._is_usable)

    def connect(self, server: RedisServer) -> RedisConnection:
        """The connection to a server, which is busy from now on."""
        if server not in self._connections:
            stall = min(STALL_SECONDS, self.deadline.remaining() / 2) if self._cluster else None
            self._connections[server] = server.acquire(self.deadline, stall)
        self._busy.add(server)
        return self._connections[server]

    def reach(self, name: bytes) -> tuple[RedisServer, bytes, RedisConnection] | None:
        """Connect to the server of a block, and its key there; ``None`` if no place has one."""
        while (place := self.place(name)) is not None:
            server, key = place
            try:
                return server, key, self.connect(server)
            except KvrelayError as error:
                self.failed(server, error)
        return None

    def answered(self, server: RedisServer) -> None:
        """A server has answered every command."""
        self._busy.discard(server)

    def failed(self, server: RedisServer, error: KvrelayError) -> None:
        """A server failed: this call uses it no more, unless only the connection was stale."""
        connection = self._connections.pop(server, None)
        self._busy.discard(server)
        self._usable[server] = was_stale(connection, error)
        self.error = error
        self._changed = True
        server.failed(connection, error)
        self.topology.mark_stale()

    def redirected(self, server: RedisServer, line: bytes) -> None:
        """A server does not have a key, or not now: ``line`` is its reply."""
        self.error = self.error or ServerRefused(server.address, line)
        self.topology.mark_stale()

    def retry(self) -> bool:
        """Prepare another round; whether it may end better than the last.

        Busy connections are closed, and the slots are asked for again if they are stale.
        """
        for server in self._busy:
            server.discard(self._connections.pop(server))
        self._busy.clear()
        if self.deadline.expired:
            return False
        refreshed = self.topology.prepare(self.deadline)
        changed = self._changed
        self._changed = False
        return changed or refreshed

    def ask(
        self, names: Sequence[bytes], request: Callable[[int, bytes], bytes], lines: int
    ) -> list[list[bytes] | None]:
        """``lines`` reply lines for each name, in one round trip to each server.

        ``request`` makes the commands from a name's index and its key. The answer is ``None`` if
        no server replied, and an empty list if the servers only redirected, as while a slot is
        migrated. Raises only if no server replied at all.
        """
        answers: list[list[bytes] | None] = [None] * len(names)
        for start in range(0, len(names), CHUNK):
            pending = list(range(start, min(start + CHUNK, len(names))))
            for _ in range(ROUNDS):
                self._round(names, pending, request, lines, answers)
                pending = [index for index in pending if not answers[index]]
                if not pending or not self.retry():
                    break
        if names and all(answer is None for answer in answers):
            raise self.no_server()
        return answers

    def no_server(self) -> KvrelayError:
        """The error of a call that no server answered."""
        return self.error or Unavailable("no server of the store can be asked now")

    def _round(
        self,
        names: Sequence[bytes],
        pending: Iterable[int],
        request: Callable[[int, bytes], bytes],
        lines: int,
        answers: list[list[bytes] | None],
    ) -> None:
        indices: dict[RedisServer, list[int]] = {}
        commands: dict[RedisServer, list[bytes]] = {}
        for index in pending:
            if (place := self.place(names[index])) is not None:
                server, key = place
                indices.setdefault(server, []).append(index)
                commands.setdefault(server, []).append(request(index, key))
        asked = [server for server in indices if self._send(server, b"".join(commands[server]))]
        for server in asked:
            self._receive(server, indices[server], lines, answers)

    def _send(self, server: RedisServer, commands: bytes) -> bool:
        try:
            self.connect(server).send(commands)
        except KvrelayError as error:
            self.failed(server, error)
            return False
        return True

    def _receive(
        self,
        server: RedisServer,
        indices: list[int],
        lines: int,
        answers: list[list[bytes] | None],
    ) -> None:
        try:
            replies = self._connections[server].replies.lines(lines * len(indices))
            errors = [
                line for line in replies if line[:1] == b"-" and error_code(line) != WRONG_TYPE
            ]
            for line in errors:
                if not is_redirect(line):
                    raise ServerRefused(server.address, line)
        except KvrelayError as error:
            self.failed(server, error)
            return
        self.answered(server)
        for number, index in enumerate(indices):
            answer = replies[number * lines : (number + 1) * lines]
            redirected = bool(errors) and any(map(is_redirect, answer))
            answers[index] = [] if redirected else answer
        if errors:
            self.redirected(server, errors[0])

    def _is_usable(self, server: RedisServer) -> bool:
        if server not in self._usable:
            refused = server.breaker.enter()
            self._usable[server] = refused is None
            self.error = self.error or refused
        return self._usable[server]
