"""The store's lanes: a TCP port and a Unix socket, a thread for each connection.

The Unix socket lives in the abstract namespace and takes peers of our own user and root only; what
comes over TCP is shown by tokens.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from dataclasses import dataclass

from kvrelay.errors import KvrelayError, Rejected
from kvrelay.v1 import store_pb2 as pb
from kvstore.server.block_store import BlockStore
from kvstore.server.session import Session
from kvstore.wire.sockets import DeadlineSocket, abstract_name, is_trusted, unix_address

log = logging.getLogger("kvrelay.store")

MAX_CONNECTIONS = 1024
"""Of each listener: strangers on the network keep nobody on this host out."""

RETRY_SECONDS = 0.2

NEAR_BUFFER = 128 << 10
"""Sent ahead to a reader on this host, over TCP. What waits longer has left the CPU's cache when it
is read, and what waits for room in the reader's window is sent on in the reader's own time."""


@dataclass(frozen=True, slots=True)
class ListenerOptions:
    """Which there are. ``port`` 0 picks a free one."""

    host: str = "127.0.0.1"
    port: int = 0
    lane: bool = True
    shared: bool = True


class TransportListener:
    """Accepts until ``stop``. ``ways`` tells clients where."""

    def __init__(self, store: BlockStore, options: ListenerOptions) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._pipes: dict[bool, set[DeadlineSocket]] = {
            True: set(),
            False: set(),
        }  # by whether local
        self._stopping = threading.Event()
        self.ways = pb.GetTransportsResponse(boot=store.boot)
        self._listeners: list[socket.socket] = []
        if options.lane:
            self._listeners.append(_listen_tcp(options))
            self.ways.socket_port = self._listeners[-1].getsockname()[1]
        if options.shared and sys.platform == "linux":
            self._listeners.append(_listen_unix(abstract_name(store.boot)))
            self.ways.unix_socket = abstract_name(store.boot)
            self.ways.arena_bytes = store.arena.size if store.arena.fd is not None else 0

    @property
    def titles(self) -> list[str]:
        """The ways there are, for people; gRPC is always one."""
        shared = ["shared memory"] if self.ways.arena_bytes else []
        lane = [f"a socket lane on port {self.ways.socket_port}"] if self.ways.socket_port else []
        return [*shared, *lane, "gRPC streams"]

    def start(self) -> None:
        """Begin to accept."""
        for listener in self._listeners:
            threading.Thread(
                target=self._accept, args=(listener,), name="lane-accept", daemon=True
            ).start()

    def stop(self) -> None:
        """Accept no more, and cut what is open."""
        self._stopping.set()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            for pipe in (pipe for pipes in self._pipes.values() for pipe in pipes):
                pipe.cut()

    def _accept(self, listener: socket.socket) -> None:
        local = listener.family == socket.AF_UNIX
        while not self._stopping.is_set():
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if not self._stopping.wait(RETRY_SECONDS):  # too many open files, most likely
                    log.warning("lane: a connection could not be taken: %s", error)
                continue
            threading.Thread(
                target=self._serve, args=(sock, local), name="lane", daemon=True
            ).start()

    def _serve(self, sock: socket.socket, local: bool) -> None:
        pipes = self._pipes[local]
        with sock:
            try:
                if (local and not is_trusted(sock)) or len(pipes) >= MAX_CONNECTIONS:
                    log.warning("lane: a connection was refused, of another user or one too many")
                    return
                _keep_short(sock)
                pipe = DeadlineSocket(sock)
            except OSError:
                return  # gone already
            with self._lock:
                pipes.add(pipe)
            try:
                Session(pipe, self._store, local).run()
            except KvrelayError as error:
                log.debug("lane: %s", error)
            except Exception as error:  # noqa: BLE001 - the edge of a thread: its connection ends
                _report(error)
            finally:
                with self._lock:
                    pipes.discard(pipe)


def _keep_short(sock: socket.socket) -> None:
    """Of a connection within this host; between hosts the system knows what a line can hold."""
    if sock.family != socket.AF_UNIX and sock.getpeername()[0] == sock.getsockname()[0]:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR_BUFFER)


def _report(error: Exception) -> None:
    log.error("lane: a connection failed", exc_info=error)


def _listen_tcp(options: ListenerOptions) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        raise Rejected(
            "lane_port", f"cannot listen on {options.host}:{options.port}: {error}"
        ) from error


def _listen_unix(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(unix_address(name))
    listener.listen(128)
    return listener
