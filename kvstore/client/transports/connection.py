"""One connection of a lane, from the client's side, and the few that a client keeps open."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kvrelay.errors import Corrupt, DeadlineExceeded, KvrelayError, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvstore.wire.frames import (
    ANSWER_BYTES,
    MAX_BODY,
    SIZE_BYTES,
    AnswerFrame,
    Op,
    RequestFrame,
    Status,
    parse_frame,
)
from kvstore.wire.peer import address_of, is_trusted
from kvstore.wire.sockets import DeadlineSocket

MAX_REASON = 1000


class StoreConnection:
    """A connection to the store's start ``boot``; an answer of another one is an error."""

    def __init__(self, sock: socket.socket, boot: bytes) -> None:
        self.pipe = DeadlineSocket(sock)
        self.boot = boot
        self.sound = True

    def ask(self, request: RequestFrame, *bodies: bytes | memoryview) -> None:
        """Send a request, its body and what follows it."""
        self.pipe.send([request.encode(), *bodies])

    def answer(self) -> AnswerFrame:
        """The head of the next answer; what follows is still to be received."""
        return self._checked(self.pipe.receive(ANSWER_BYTES))

    def body(self) -> bytes | None:
        """The next answer, which is small; ``None``: lease or ticket is gone."""
        answer = self.answer()
        if answer.length > MAX_BODY:
            raise Corrupt("answer", f"{answer.length} bytes are more than {MAX_BODY}")
        body = self.pipe.receive(answer.length)
        return None if answer.status is Status.GONE else body

    def release(self, lease: int, token: bytes) -> None:
        """Give a lease back. If that fails it ends by its deadline, and this line is no more."""
        try:
            self.ask(RequestFrame(Op.RELEASE, lease, token))
            self.body()
        except KvrelayError:
            self.sound = False

    def descriptor(self) -> tuple[int, int]:
        """The descriptor that comes with the next answer, and the size of what it is of."""
        data, fd = self.pipe.receive_descriptor(ANSWER_BYTES)
        try:
            answer = self._checked(data)
            if fd is None or answer.length != SIZE_BYTES:
                raise Corrupt("answer", "a descriptor was asked for and did not come")
            return fd, int.from_bytes(self.pipe.receive(SIZE_BYTES), "little")
        except KvrelayError:
            if fd is not None:
                os.close(fd)
            raise

    def _checked(self, data: bytes) -> AnswerFrame:
        answer = parse_frame(data)
        if answer.boot != self.boot:
            raise Unavailable("the store was started anew")
        if answer.status is Status.REJECTED:
            reason = self.pipe.receive(min(answer.length, MAX_REASON))
            raise Corrupt("lane", f"refused: {reason.decode('utf-8', 'replace')}")
        return answer


def dial_unix(name: str, deadline: Deadline, boot: bytes) -> StoreConnection:
    """To a store on this host that is run by our own user or root."""
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(deadline.remaining())
        sock.connect(address_of(name))
    except OSError as error:
        raise Unavailable(f"the store is not on this host: {error}") from error
    if not is_trusted(sock):
        sock.close()
        raise Unavailable("the store on this host is run by another user")
    return StoreConnection(sock, boot)


def dial_tcp(host: str, port: int, deadline: Deadline, boot: bytes) -> StoreConnection:
    """To a store on any host."""
    try:
        return StoreConnection(socket.create_connection((host, port), deadline.remaining()), boot)
    except OSError as error:
        raise Unavailable(f"no lane to {host}:{port}: {error}") from error


class Pooled(Protocol):
    """A connection."""

    @property
    def pipe(self) -> DeadlineSocket:
        """What it sends and receives by."""


P = TypeVar("P", bound=Pooled)


class ConnectionPool(Generic[P]):
    """Connections at rest and in use; as many as there are calls at once."""

    def __init__(self, dial: Callable[[Deadline], P]) -> None:
        self._dial = dial
        self._lock = threading.Lock()
        self._resting: list[P] = []
        self._used: set[P] = set()
        self._closed = False

    def take(self, deadline: Deadline) -> P:
        """One for the caller alone; to be given back or dropped."""
        with self._lock:
            line = self._resting.pop() if self._resting else None
        if line is None:
            if deadline.expired:
                raise DeadlineExceeded("no time is left to connect")
            line = self._dial(deadline)
        with self._lock:
            if not self._closed:
                self._used.add(line)
                return line
        line.pipe.close()
        raise Unavailable("this store was closed")

    def give(self, line: P) -> None:
        """All that was asked has been answered."""
        with self._lock:
            self._used.discard(line)
            if not self._closed:
                self._resting.append(line)
                return
        line.pipe.close()

    def drop(self, line: P) -> None:
        """It broke, or was left in the middle."""
        with self._lock:
            self._used.discard(line)
        line.pipe.close()

    def clear(self) -> None:
        """End those at rest."""
        with self._lock:
            resting = self._resting
            self._resting = []
        for line in resting:
            line.pipe.close()

    def close(self, cut: bool = True) -> None:
        """No more calls. Those under way fail, or with ``cut=False`` end; each closes its own."""
        with self._lock:
            self._closed = True
            used = list(self._used) if cut else []
        self.clear()
        for line in used:
            line.pipe.cut()
