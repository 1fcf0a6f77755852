"""One connection of a lane, from the client's side, and the few that a client keeps open."""

from __future__ import annotations

import os
import socket

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
    """A connection to the store's start ``boot``; an answer of another one is an error."""

    def __init__(self, sock: socket.socket, boot: bytes) -> None:
        self.sock = DeadlineSocket(sock)
        self.boot = boot
        self.sound = True

    def ask(self, request: RequestFrame, *bodies: bytes | memoryview) -> None:
        """Send a request, its body and what follows it."""
        self.sock.send([request.encode(), *bodies])

    def answer(self) -> AnswerFrame:
        """The head of the next answer; what follows is still to be received."""
        return self._checked(self.sock.receive(ANSWER_BYTES))

    def body(self) -> bytes | None:
        """The next answer, which is small; ``None``: lease or ticket is gone."""
        answer = self.answer()
        if answer.length > MAX_BODY:
            raise Corrupt("answer", f"{answer.length} bytes are more than {MAX_BODY}")
        body = self.sock.receive(answer.length)
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
        data, fd = self.sock.receive_descriptor(ANSWER_BYTES)
        try:
            answer = self._checked(data)
            if fd is None or answer.length != SIZE_BYTES:
                raise Corrupt("answer", "a descriptor was asked for and did not come")
            return fd, int.from_bytes(self.sock.receive(SIZE_BYTES), "little")
        except KvrelayError:
            if fd is not None:
                os.close(fd)
            raise

    def _checked(self, data: bytes) -> AnswerFrame:
        answer = parse_frame(data)
        if answer.boot != self.boot:
            raise Unavailable("the store was started anew")
        if answer.status is Status.REJECTED:
            reason = self.sock.receive(min(answer.length, MAX_REASON))
            raise Corrupt("lane", f"refused: {reason.decode('utf-8', 'replace')}")
        return answer


def dial_unix(name: str, deadline: Deadline, boot: bytes) -> StoreConnection:
    """To a store on this host that is run by our own user or root."""
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
    """To a store on any host."""
    try:
        return StoreConnection(socket.create_connection((host, port), deadline.remaining()), boot)
    except OSError as error:
        raise Unavailable(f"no lane to {host}:{port}: {error}") from error
