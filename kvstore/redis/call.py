"""One call of a store: the servers it counts on, its links to them, and what becomes of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvrelay.errors import KvrelayError, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvstore.redis.connection import RedisConnection
from kvstore.redis.server import RedisServer, ServerRefused, was_idle
from kvstore.redis.topology import Topology

ROUNDS = 4
"""A call tries again when a server was lost or a key was elsewhere, but not for ever."""

CHUNK = 4096
"""Names in one round trip."""

STALL_SECONDS = 2.0
"""In a cluster no server is waited for any longer, nor for more than half of the time left."""

REDIRECTS = frozenset(
    ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "LOADING", "READONLY")
)
"""First words of the errors of a server that has not got the key, or not now."""

NO_VALUE = "WRONGTYPE"
"""The first word of the error about a key of somebody else, which is no block: as if absent."""


def error_code(line: bytes) -> str | None:
    """The first word of an answer that is an error."""
    return line[1:].split(b" ", 1)[0].decode("ascii", "replace") if line[:1] == b"-" else None


def is_redirect(line: bytes) -> bool:
    """Whether an answer says that the server has not got the key, or not now."""
    return line[:1] == b"-" and error_code(line) in REDIRECTS


class RedisCall:
    """A context: what is left unanswered when it ends costs its connection."""

    def __init__(self, topology: Topology, deadline: Deadline, cluster: bool) -> None:
        self.topology = topology
        self.deadline = deadline
        self.error: KvrelayError | None = None
        self._cluster = cluster
        self._up: dict[RedisServer, bool] = {}
        self._links: dict[RedisServer, RedisConnection] = {}
        self._busy: set[RedisServer] = set()
        self._changed = False  # since the last round

    def __enter__(self) -> RedisCall:
        self.deadline.check("to ask the store")  # which is no failure of a server
        self.topology.prepare(self.deadline)
        return self

    def __exit__(self, *_: object) -> None:
        for node, link in self._links.items():
            node.drop(link) if node in self._busy else node.give(link)
        self._links.clear()
        self._busy.clear()

    def place(self, name: bytes) -> tuple[RedisServer, bytes] | None:
        """The server and the key of a block; ``None`` if there is no server to ask for it."""
        return self.topology.place(name, self._is_up)

    def begin(self, node: RedisServer) -> RedisConnection:
        """The link to a server, which from now on owes answers."""
        if node not in self._links:
            stall = min(STALL_SECONDS, self.deadline.remaining() / 2) if self._cluster else None
            self._links[node] = node.take(self.deadline, stall)
        self._busy.add(node)
        return self._links[node]

    def done(self, node: RedisServer) -> None:
        """It has answered everything."""
        self._busy.discard(node)

    def lost(self, node: RedisServer, error: KvrelayError) -> None:
        """A server failed: it is not asked again, unless it was only an old connection's end."""
        link = self._links.pop(node, None)
        self._busy.discard(node)
        self._up[node] = was_idle(link, error)
        self.error = error
        self._changed = True
        node.failed(link, error)
        self.topology.doubt()

    def astray(self, node: RedisServer, line: bytes) -> None:
        """A server has not got a key, or not now: ``line`` is its answer."""
        self.error = self.error or ServerRefused(node.address, line)
        self.topology.doubt()

    def again(self) -> bool:
        """Before another round, and whether it might end better than the last.

        Links that still owe answers are given up, and it is asked again who has what.
        """
        for node in self._busy:
            node.drop(self._links.pop(node))
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
        """So many lines for each name, in one round trip to each server.

        None at all (an empty list) when the servers were there and sent us to one another, as
        while a slot is moved; ``None`` when there was no answer. ``request`` makes the commands
        from a name's number and its key. Raises only if no server answered at all.
        """
        answers: list[list[bytes] | None] = [None] * len(names)
        for start in range(0, len(names), CHUNK):
            pending = list(range(start, min(start + CHUNK, len(names))))
            for _ in range(ROUNDS):
                self._round(names, pending, request, lines, answers)
                pending = [index for index in pending if not answers[index]]
                if not pending or not self.again():
                    break
        if names and all(answer is None for answer in answers):
            raise self.error or Unavailable("no server of the store is to be asked now")
        return answers

    def _round(
        self,
        names: Sequence[bytes],
        pending: Iterable[int],
        request: Callable[[int, bytes], bytes],
        lines: int,
        answers: list[list[bytes] | None],
    ) -> None:
        plan: dict[RedisServer, list[int]] = {}
        commands: dict[RedisServer, list[bytes]] = {}
        for index in pending:
            if (place := self.place(names[index])) is not None:
                plan.setdefault(place[0], []).append(index)
                commands.setdefault(place[0], []).append(request(index, place[1]))
        asked = [node for node in plan if self._sent(node, b"".join(commands[node]))]
        for node in asked:
            self._received(node, plan[node], lines, answers)

    def _sent(self, node: RedisServer, commands: bytes) -> bool:
        try:
            self.begin(node).ask(commands)
        except KvrelayError as error:
            self.lost(node, error)
            return False
        return True

    def _received(
        self, node: RedisServer, indices: list[int], lines: int, answers: list[list[bytes] | None]
    ) -> None:
        try:
            found = self._links[node].replies.lines(lines * len(indices))
            refused = [line for line in found if line[:1] == b"-" and error_code(line) != NO_VALUE]
            for line in refused:
                if not is_redirect(line):
                    raise ServerRefused(node.address, line)
        except KvrelayError as error:
            self.lost(node, error)
            return
        self.done(node)
        for number, index in enumerate(indices):
            answer = found[number * lines : (number + 1) * lines]
            astray = bool(refused) and any(map(is_redirect, answer))
            answers[index] = [] if astray else answer
        if refused:
            self.astray(node, refused[0])

    def _is_up(self, node: RedisServer) -> bool:
        if node not in self._up:
            wait = node.circuit.enter()
            self._up[node] = not wait
            if wait and self.error is None:
                self.error = Unavailable(
                    f"{node.address} did not answer; the next try is in {wait:.1f} s"
                )
        return self._up[node]
