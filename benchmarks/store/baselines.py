"""What the store's transports are compared with: a copy within a process, a bare socket."""

from __future__ import annotations

import mmap
import socket
import sys
import time
from dataclasses import replace

import numpy as np

from benchmarks.store.child import start_child
from benchmarks.store.rig import GB, HEADS, Run, StoreRig
from kvrelay.block.header import checksums, encode
from kvrelay.block.verify import verify_block
from kvstore.wire.copying import copy_summed

_SENDER = """
import socket, sys
port, size, count = map(int, sys.argv[1:])
data = memoryview(bytearray(b"x") * (size * count))
sock = socket.create_connection(("127.0.0.1", port))
while (order := sock.recv(8)):
    for n in range(int.from_bytes(order, "little")):
        sock.sendall(data[n % count * size : n % count * size + size])
"""


class MemcpyBaseline:
    """The same bytes, from one memory of this process into another.

    ``checked``: as a reader does who shares the memory of a store, checksum and header compared.
    What that costs more is what verification costs.
    """

    def __init__(self, rig: StoreRig, checked: bool = False) -> None:
        self._rig = rig
        self._checked = checked
        self._map = mmap.mmap(-1, len(rig.pool))

    def __enter__(self) -> Run:
        """Touch it."""
        source = np.frombuffer(self._map, np.uint8)
        source[:] = 1
        size, count, rig = self._rig.size, self._rig.count, self._rig
        view, wanted = memoryview(self._map).toreadonly(), rig.wanted[0]
        header = encode(replace(rig.header(wanted), checksums=checksums(view[:size], HEADS)))

        def copy_one(n: int) -> None:
            start = n % count * size
            np.copyto(rig.pool[start : start + size], source[start : start + size])

        def copy_checked(n: int) -> None:
            start, target = n % count * size, rig.buffer(n % count)
            summed = copy_summed(target, view[start : start + size], HEADS)
            verify_block(header, wanted, target, summed)

        def run(total: int) -> float:
            one, began = copy_checked if self._checked else copy_one, time.perf_counter()
            for n in range(total // size):
                one(n)
            return total // size * size / (time.perf_counter() - began) / GB

        return run

    def __exit__(self, *_: object) -> None:
        """It goes with its last user."""


class SocketBaseline:
    """A plain socket and ``recv_into``, with another process that does nothing but send."""

    def __init__(self, rig: StoreRig) -> None:
        self._rig = rig
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        few = min(rig.count, max(1, (64 << 20) // rig.size))
        command = [sys.executable, "-c", _SENDER, str(port), str(rig.size), str(few)]
        self._process = start_child(command)
        self._sock = self._listener.accept()[0]

    def __enter__(self) -> Run:
        """It is connected."""
        size, count = self._rig.size, self._rig.count

        def run(total: int) -> float:
            began = time.perf_counter()
            self._sock.sendall((total // size).to_bytes(8, "little"))
            for n in range(total // size):
                view = self._rig.buffer(n % count)
                while len(view):
                    view = view[self._sock.recv_into(view) :]
            return total // size * size / (time.perf_counter() - began) / GB

        return run

    def __exit__(self, *_: object) -> None:
        """Hang up."""
        self._sock.close()
        self._listener.close()
        self._process.wait()
