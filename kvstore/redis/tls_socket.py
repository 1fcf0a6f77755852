"""A pipe through TLS: the same promises, in the pieces in which TLS comes."""

from __future__ import annotations

import contextlib
import socket
import ssl

from kvstore.wire.sockets import DeadlineSocket

JOINED = 64 << 10
"""Small buffers are sent as one record rather than as one each."""


class TlsSocket(DeadlineSocket):
    """``sock`` has done its handshake."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)

    def _wait_at_most(self, seconds: float | None) -> None:
        self._sock.settimeout(seconds)

    def _send_some(self, group: list[memoryview]) -> int:
        joined, size = 0, 0
        while joined < len(group) and size + len(group[joined]) <= JOINED:
            size += len(group[joined])
            joined += 1
        return self._sock.send(b"".join(group[:joined]) if joined > 1 else group[0])

    def _fill(self, group: list[memoryview]) -> int:
        return self._sock.recv_into(group[0])

    def _take(self, count: int) -> bytes:
        return self._sock.recv(count)

    def cut(self) -> None:
        """As of every pipe; TLS is not told, since another thread may be using it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
