"""The server of the socket and shared-memory transports: a TCP port and a Unix socket.

Each connection has a thread. The Unix socket is abstract, or a file in a folder that other
containers mount; it accepts only peers of our own user and root. A peer over TCP must show proofs
of its leases and tickets.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import stat
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from kvrelay.errors import KvrelayError, Rejected
from kvrelay.rpc.address import Address
from kvrelay.rpc.reserved import is_reserved
from kvrelay.v1 import store_pb2 as pb
from kvstore.server.block_store import BlockStore
from kvstore.server.session import Session
from kvstore.wire.sockets import DeadlineSocket, abstract_name, is_trusted, unix_address

log = logging.getLogger("kvrelay.store")

MAX_CONNECTIONS = 1024
"""Of each listener, so that remote peers cannot exhaust the connections of local ones."""

RETRY_SECONDS = 0.2

NEAR_BUFFER = 128 << 10
"""Send buffer of a TCP connection within this host. Bytes that wait longer have left the CPU's
cache when they are read, and bytes that wait for the reader's window are sent in its time."""


@dataclass(frozen=True, slots=True)
class ListenerOptions:
    """Where to listen; ``port`` 0 picks a free one, ``shared_socket`` ``None`` is abstract."""

    host: str = "127.0.0.1"
    port: int = 0
    socket: bool = True
    shared: bool = True
    shared_socket: str | None = None


class TransportListener:
    """Accepts until ``stop``. ``transports`` tells clients where to connect."""

    def __init__(self, store: BlockStore, options: ListenerOptions) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._open: dict[bool, set[DeadlineSocket]] = {True: set(), False: set()}  # by ``local``
        self._stopping = threading.Event()
        self.transports = pb.GetTransportsResponse(boot=store.boot)
        self._listeners: list[socket.socket] = []
        if options.socket:
            self._listeners.append(_listen_tcp(options))
            self.transports.socket_port = self._listeners[-1].getsockname()[1]
        if options.shared and sys.platform == "linux":
            name = options.shared_socket or abstract_name(store.boot)
            self._listeners.append(_listen_unix(name))
            self.transports.unix_socket = name
            self.transports.arena_bytes = store.arena.size if store.arena.fd is not None else 0

    @property
    def titles(self) -> list[str]:
        """The transports for log lines; gRPC is always one."""
        shared = ["shared memory"] if self.transports.arena_bytes else []
        port = self.transports.socket_port
        sockets = [f"sockets on port {port}"] if port else []
        return [*shared, *sockets, "gRPC streams"]

    def start(self) -> None:
        """Start accepting."""
        for listener in self._listeners:
            threading.Thread(
                target=self._accept, args=(listener,), name="socket-accept", daemon=True
            ).start()

    def stop(self) -> None:
        """Stop accepting and close every open connection."""
        self._stopping.set()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            for sock in (sock for socks in self._open.values() for sock in socks):
                sock.cut()

    def _accept(self, listener: socket.socket) -> None:
        local = listener.family == socket.AF_UNIX
        while not self._stopping.is_set():
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if not self._stopping.wait(RETRY_SECONDS):  # too many open files, most likely
                    log.warning("socket: a connection could not be accepted: %s", error)
                continue
            threading.Thread(
                target=self._serve, args=(sock, local), name="socket", daemon=True
            ).start()

    def _serve(self, sock: socket.socket, local: bool) -> None:
        connections = self._open[local]
        with sock:
            try:
                if (local and not is_trusted(sock)) or len(connections) >= MAX_CONNECTIONS:
                    log.warning("socket: connection refused: another user's, or too many are open")
                    return
                _keep_short(sock)
                connection = DeadlineSocket(sock)
            except OSError:
                return  # the peer has left
            with self._lock:
                connections.add(connection)
            try:
                Session(connection, self._store, local).run()
            except KvrelayError as error:
                log.debug("socket: %s", error)
            except Exception as error:  # noqa: BLE001 - the edge of a thread: its connection ends
                _report(error)
            finally:
                with self._lock:
                    connections.discard(connection)


def _keep_short(sock: socket.socket) -> None:
    """Set the send buffer of a connection within this host; else the system's choice is better."""
    if sock.family != socket.AF_UNIX and sock.getpeername()[0] == sock.getsockname()[0]:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR_BUFFER)


def _report(error: Exception) -> None:
    log.error("socket: a connection failed", exc_info=error)


def _listen_tcp(options: ListenerOptions) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        shared = is_reserved(Address(options.host, options.port))
        return socket.create_server(address[:2], family=family, backlog=128, reuse_port=shared)
    except OSError as error:
        raise Rejected(
            "socket_port", f"cannot listen on {options.host}:{options.port}: {error}"
        ) from error


def _listen_unix(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if name.startswith("/"):
            _remove_stale(name)
        listener.bind(unix_address(name))
    except OSError as error:
        listener.close()
        raise Rejected("shared_socket", f"cannot listen on {name}: {error}") from error
    listener.listen(128)
    return listener


def _remove_stale(name: str) -> None:
    """Remove a socket on which nothing listens any more; leave other files alone."""
    path = Path(name)
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(name)
        except ConnectionRefusedError:
            path.unlink()
