"""One connection to the store's socket, TCP or Unix, from the client's side."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from kvrelay.errors import Corrupt, KvrelayError, Unavailable
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
from kvstore.wire.sockets import DeadlineSocket, is_trusted, unix_address

MAX_REASON = 1000


class StoreConnection:
    """A connection to the store's start ``boot``; an answer of another start is an error."""

    def __init__(self, sock: socket.socket, boot: bytes) -> None:
        self.sock = DeadlineSocket(sock)
        self.boot = boot
        self.usable = True
        self._ends: list[Callable[[], None]] = []

    def at_close(self, end: Callable[[], None]) -> None:
        """Call ``end`` once this connection is closed."""
        self._ends.append(end)

    def close(self) -> None:
        """Close the socket, and give back what belongs to the connection."""
        self.sock.close()
        for end in self._ends:
            end()

    def send(self, request: RequestFrame, *bodies: bytes | memoryview) -> None:
        """Send a request, its body and the bytes of blocks that follow it."""
        self.sock.send([request.encode(), *bodies])

    def receive_frame(self) -> AnswerFrame:
        """The head of the next answer; its body is still to be received."""
        return self._checked(self.sock.receive(ANSWER_BYTES))

    def receive_body(self) -> bytes | None:
        """The body of the next answer, which is small; ``None``: lease or ticket has ended."""
        answer = self.receive_frame()
        if answer.length > MAX_BODY:
            raise Corrupt("answer", f"{answer.length} bytes are more than {MAX_BODY}")
        body = self.sock.receive(answer.length)
        return None if answer.status is Status.ENDED else body

    def release(self, lease: int, proof: bytes) -> None:
        """Release a lease. If that fails it ends by its deadline, and this connection is closed."""
        try:
            self.send(RequestFrame(Op.RELEASE, lease, proof))
            self.receive_body()
        except KvrelayError:
            self.usable = False

    def receive_descriptor(self) -> tuple[int, int]:
        """The file descriptor that comes with the next answer, and the size of its memory."""
        data, fd = self.sock.receive_descriptor(ANSWER_BYTES)
        try:
            answer = self._checked(data)
            if fd is None or answer.length != SIZE_BYTES:
                raise Corrupt("answer", "it has no file descriptor")
            return fd, int.from_bytes(self.sock.receive(SIZE_BYTES), "little")
        except KvrelayError:
            if fd is not None:
                os.close(fd)
            raise

    def _checked(self, data: bytes) -> AnswerFrame:
        answer = parse_frame(data)
        if answer.boot != self.boot:
            raise Unavailable("the store was restarted")
        if answer.status is Status.REJECTED:
            reason = self.sock.receive(min(answer.length, MAX_REASON))
            raise Corrupt("request", f"refused: {reason.decode('utf-8', 'replace')}")
        return answer


def dial_unix(name: str, deadline: Deadline, boot: bytes) -> StoreConnection:
    """Connect to a store on this host that our own user or root runs."""
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(deadline.remaining())
        sock.connect(unix_address(name))
    except OSError as error:
        raise Unavailable(f"the store is not on this host: {error}") from error
    if not is_trusted(sock):
        sock.close()
        raise Unavailable("the store on this host is run by another user")
    return StoreConnection(sock, boot)


def dial_tcp(host: str, port: int, deadline: Deadline, boot: bytes) -> StoreConnection:
    """Connect to a store on any host."""
    try:
        return StoreConnection(socket.create_connection((host, port), deadline.remaining()), boot)
    except OSError as error:
        raise Unavailable(f"cannot connect to the store's socket {host}:{port}: {error}") from error
