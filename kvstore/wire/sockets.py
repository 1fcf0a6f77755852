"""Sockets whose operations transfer every byte or end by a deadline; their errors become ours here.

They block, with the system's own timeouts: one call for a megabyte instead of one for each packet.
Also the address of the store's Unix socket, and the check of who is at its other end.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from kvrelay.errors import DeadlineExceeded, KvrelayError, Unavailable

GROUP = 256
"""Buffers in one system call; it takes 1,024 at most."""

SEND_BUFFER = 1 << 20
_CLOSE_ON_EXEC = socket.MSG_CMSG_CLOEXEC if sys.platform == "linux" else 0
_CREDENTIALS = struct.Struct("iII")
_TIMEVAL = struct.Struct("ll")


class DeadlineSocket:
    """One connection, used and closed by one thread; other threads may ``cut`` it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._until: float | None = None
        self._wait: float | None = None  # the timeout that the system has
        sock.settimeout(None)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)

    def limit(self, seconds: float | None, stall: float | None = None) -> None:
        """Set the deadline of all operations from now on, ``seconds`` from now; ``None``: none.

        An operation that begins before the deadline may end up to ``seconds`` after it. With
        ``stall`` it ends earlier when no byte moves for so many seconds.
        """
        self._until = None if seconds is None else time.monotonic() + seconds
        if seconds is not None and seconds <= 0:
            raise DeadlineExceeded("no time is left for this connection")
        wait = seconds if stall is None or seconds is None else min(seconds, stall)
        if wait != self._wait:
            with _mapped_errors():
                self._wait_at_most(wait)
            self._wait = wait

    def _wait_at_most(self, seconds: float | None) -> None:
        value = max(round((seconds or 0.0) * 1e6), 1 if seconds else 0)
        packed = _TIMEVAL.pack(value // 1_000_000, value % 1_000_000)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)

    def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send all the bytes of ``buffers``."""
        self._transfer(buffers, self._send_some)

    def receive_into(self, buffers: Sequence[memoryview]) -> None:
        """Fill all of ``buffers``."""
        self._transfer(buffers, self._fill)

    def receive(self, count: int) -> bytes:
        """``count`` bytes; the caller has checked that they are few."""
        data = bytearray(count)
        self.receive_into([memoryview(data)])
        return bytes(data)

    def receive_some(self, buffer: memoryview) -> int:
        """Receive what has arrived, at least a byte and at most all of ``buffer``; how much."""
        with _mapped_errors():
            self._check()
            return _some(self._sock.recv_into(buffer))

    def _transfer(
        self, buffers: Sequence[bytes | memoryview], move: Callable[[list[memoryview]], int]
    ) -> None:
        """``move`` some bytes of a group of buffers, until all are moved."""
        views = [memoryview(buffer) for buffer in buffers if len(buffer)]
        first = 0
        with _mapped_errors():
            while first < len(views):
                self._check()
                group = views[first : first + GROUP]
                first += _advance(views, first, len(group), _some(move(group)))

    def _send_some(self, group: list[memoryview]) -> int:
        return self._sock.sendmsg(group)

    def _fill(self, group: list[memoryview]) -> int:
        return self._sock.recvmsg_into(group, 0, socket.MSG_WAITALL)[0]

    def wait_readable(self, idle: bool = False) -> bool:
        """Wait for the next byte; false if the other side has closed the connection.

        An ``idle`` connection may stay silent for any time.
        """
        while True:
            try:
                return bool(self._sock.recv(1, socket.MSG_PEEK))
            except BlockingIOError as error:
                if not idle:
                    raise _ours(error) from error
            except OSError as error:
                raise _ours(error) from error

    def send_descriptor(self, data: bytes, fd: int) -> None:
        """Send ``data``, and a file descriptor with it."""
        rights = array.array("i", [fd]).tobytes()
        with _mapped_errors():
            sent = self._sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            if sent < len(data):
                self._sock.sendall(data[sent:])

    def receive_descriptor(self, count: int) -> tuple[bytes, int | None]:
        """``count`` bytes and the descriptor sent with them; the caller closes it."""
        with _mapped_errors():
            fds = array.array("i")
            room = socket.CMSG_SPACE(fds.itemsize)
            data, ancillary, _, _ = self._sock.recvmsg(count, room, _CLOSE_ON_EXEC)
        _some(len(data))
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        try:
            rest = b"" if len(data) == count else self.receive(count - len(data))
        except KvrelayError:
            for fd in fds:
                os.close(fd)
            raise
        return data + rest, fds[0] if fds else None

    def _check(self) -> None:
        if self._until is not None and time.monotonic() > self._until:
            raise DeadlineExceeded("the other side of the connection was too slow")

    def cut(self) -> None:
        """The operation under way fails at once, and so does every later one."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


@contextlib.contextmanager
def _mapped_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _ours(error) from error


def _ours(error: OSError) -> KvrelayError:
    if isinstance(error, BlockingIOError | TimeoutError):
        return DeadlineExceeded("the other side of the connection was too slow")
    return Unavailable(f"the connection broke: {error}")


def _some(count: int) -> int:
    if not count:
        raise Unavailable("the connection was closed by the other side")
    return count


def _advance(views: list[memoryview], first: int, count: int, done: int) -> int:
    """How many buffers ``done`` bytes complete; the next one is cut to the part that is left."""
    if done == sum(map(len, views[first : first + count])):
        return count  # nearly always
    for index in range(count):
        if done < len(views[first + index]):
            views[first + index] = views[first + index][done:]
            return index
        done -= len(views[first + index])
    return count


def abstract_name(boot: bytes) -> str:
    """Name of the store's socket in the abstract namespace, without its leading zero byte.

    It is no file and ends with its process. The store sends it to authenticated clients only.
    """
    return f"kvrelay-store-{boot.hex()}"


def unix_address(name: str) -> str:
    """The address of an abstract name, or of a file, as ``bind`` and ``connect`` take it."""
    return name if name.startswith("/") else "\0" + name


def is_trusted(sock: socket.socket) -> bool:
    """Whether the system says that the peer of a Unix socket runs as our own user or as root."""
    if sys.platform != "linux":
        return False
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return uid in (0, os.getuid())
