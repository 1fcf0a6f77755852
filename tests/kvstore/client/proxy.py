"""Something between a client and a store that cuts, delays and flips what goes through it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

CHUNK = 64 << 10
MAX_ANCILLARY = socket.CMSG_SPACE(16)


@dataclass
class Fault:
    """What is done to bytes that go to the client (``down``) or to the store (``up``)."""

    cut_down: int | None = None  # the connection ends after so many bytes
    cut_up: int | None = None
    flip_down: int | None = None  # this byte is changed
    flip_up: int | None = None
    delay: float = 0.0  # seconds before each chunk
    hit: threading.Event = field(default_factory=threading.Event)


class Proxy:
    """Listens beside ``target`` (an address of its family) and passes on, descriptors too."""

    def __init__(self, family: socket.AddressFamily, target: tuple[str, int] | str) -> None:
        self._family = family
        self._target = target
        self.fault = Fault()
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        own: tuple[str, int] | str = ("127.0.0.1", 0)
        if family == socket.AF_UNIX:
            own = f"\0kvrelay-test-{os.urandom(8).hex()}"
        self._listener.bind(own)
        self._listener.listen(64)
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """Of a TCP proxy."""
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def name(self) -> str:
        """Of a Unix proxy, without its leading zero."""
        name: bytes = self._listener.getsockname()
        return name.decode().removeprefix("\0")

    def close(self) -> None:
        """Cut everything."""
        for sock in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                store = socket.socket(self._family, socket.SOCK_STREAM)
                store.connect(self._target)
                self._open += [client, store]
                for source, sink, down in ((client, store, False), (store, client, True)):
                    threading.Thread(
                        target=self._pump, args=(source, sink, down, self.fault), daemon=True
                    ).start()

    def _pump(self, source: socket.socket, sink: socket.socket, down: bool, fault: Fault) -> None:
        cut = fault.cut_down if down else fault.cut_up
        flip = fault.flip_down if down else fault.flip_up
        seen = 0
        with contextlib.suppress(OSError):
            while True:
                data, ancillary, _, _ = source.recvmsg(CHUNK, MAX_ANCILLARY)
                if not data:
                    break
                if fault.delay:
                    time.sleep(fault.delay)
                if flip is not None and seen <= flip < seen + len(data):
                    at = flip - seen
                    data = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
                    fault.hit.set()
                if cut is not None and seen + len(data) > cut:
                    fault.hit.set()
                    sink.sendall(data[: cut - seen])
                    break
                seen += len(data)
                sent = sink.sendmsg([data], ancillary)
                sink.sendall(data[sent:])
                for _, _, descriptors in ancillary:
                    for start in range(0, len(descriptors), 4):
                        os.close(int.from_bytes(descriptors[start : start + 4], "little"))
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def closing(made: Callable[[], Proxy]) -> Iterator[Proxy]:
    """A proxy for a while."""
    proxy = made()
    try:
        yield proxy
    finally:
        proxy.close()
