"""The rows of the store's speed table: each moves some bytes and says how fast."""

from __future__ import annotations

import itertools
import mmap
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

import numpy as np

from common.errors import Corrupt, Unavailable
from kvblock.header import Header, checksum, encode, header_bytes
from kvblock.name import child_name
from kvblock.verify import Wanted, verify_block
from kvstore.base import Block, Kept, Lease, Offer, Store, Want
from kvstore.client.remote import RemoteStore
from kvstore.messages import MAX_NAMES
from kvstore.server.vault import ENTRY_BYTES
from kvstore.ways.choice import ORDER
from kvstore.wire.copying import copy_summed

GET_BLOCKS = 256
FILL_BYTES = 4 << 20
PUT_BLOCKS = 32
TIMEOUT = 120.0
HOLD_SECONDS = 600.0
TOKENS = tuple(range(16))
SPACE = b"bench".ljust(32, b"\0")
GB = 1e9

Run = Callable[[int], float]
"""Bytes to move in; bytes per second / 1e9 out."""

_SENDER = """
import socket, sys
port, size, count = map(int, sys.argv[1:])
data = memoryview(bytearray(b"x") * (size * count))
sock = socket.create_connection(("127.0.0.1", port))
while (order := sock.recv(8)):
    for n in range(int.from_bytes(order, "little")):
        sock.sendall(data[n % count * size : n % count * size + size])
"""


class Rig:
    """A store as a process, full of blocks of ``size``, and a pool as large as all of them."""

    def __init__(self, size: int, working_set: int) -> None:
        self.size, self.count = size, working_set // size
        self.pool = np.random.default_rng(7).integers(0, 256, self.count * size, np.uint8)
        self.block_bytes = header_bytes(len(TOKENS)) + size
        budget = 2 * self.count * (self.block_bytes + ENTRY_BYTES) + (8 << 20)
        command = [sys.executable, "-m", "kvstore", f"--budget={budget}", "--log-level=error"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._leases: list[Lease] = []
        self.others: list[int] = []  # processes of other stores that are measured beside ours
        self._parents = (n.to_bytes(32, "little") for n in itertools.count(1))
        self.wanted = [self._wanted() for _ in range(self.count)]
        self._stores: dict[str, RemoteStore] = {}

    def __enter__(self) -> Rig:
        """Fill the store; whatever comes between, a store that was started ends."""
        try:
            line = self._process.stdout.readline() if self._process.stdout else ""
            if not line.startswith("store ready at "):
                raise Unavailable(f"the store did not start: {line!r}")
            self.address = line.split()[3].rstrip(",")
            self._stores = {way: RemoteStore(self.address, way) for way in ORDER}
            self._fill()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        """End it."""
        self._end()

    def _end(self) -> None:
        for store in self._stores.values():
            store.close()
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def processor(self) -> tuple[float, float]:
        """Seconds of processor time that this process and the stores have used."""
        pids = self._process.pid, *self.others
        return time.process_time(), sum(time.clock_gettime(_clock_of(pid)) for pid in pids)

    def store(self, way: str) -> RemoteStore:
        """A client of it that goes this way."""
        return self._stores[way]

    def buffer(self, index: int) -> memoryview:
        """Where a block lies in the pool."""
        start = index * self.size
        return self.pool.data[start : start + self.size]

    def hold(self) -> None:
        """Keep the blocks that are read from being evicted by those that are put."""
        store, leases = self.store("grpc"), []
        for start in range(0, self.count, MAX_NAMES):
            names = [wanted.name for wanted in self.wanted[start : start + MAX_NAMES]]
            held = store.lookup(names, [], HOLD_SECONDS, TIMEOUT)
            if held.lead != len(names) or held.lease is None:
                raise Corrupt("lookup", f"{held.lead} of {len(names)} blocks are there")
            leases.append(held.lease)
        store.release(self._leases, TIMEOUT)
        self._leases = leases

    def offer(self, index: int, wanted: Wanted) -> Offer:
        """To put the block in the pool at ``index``; its header is made when it is read."""
        payload = self.buffer(index)

        def read() -> Block:
            return Block(encode(self.header(wanted)), payload, sealed=False)

        return Offer(wanted.name, self.block_bytes, False, read)

    def header(self, wanted: Wanted) -> Header:
        """Of a block, without the checksum of its payload."""
        return Header(
            SPACE, wanted.parent, wanted.name, TOKENS, "uint8", (self.size,), self.size, 0
        )

    def new_offers(self, count: int) -> list[Offer]:
        """Blocks the store does not have yet."""
        return [self.offer(n % self.count, self._wanted()) for n in range(count)]

    def _wanted(self) -> Wanted:
        parent = next(self._parents)
        name = child_name(SPACE, parent, TOKENS)
        return Wanted(SPACE, parent, name, TOKENS, "uint8", (self.size,))

    def _fill(self) -> None:
        step = max(PUT_BLOCKS, FILL_BYTES // self.block_bytes)
        for start in range(0, self.count, step):
            end = min(start + step, self.count)
            offers = [self.offer(n, self.wanted[n]) for n in range(start, end)]
            all_stored(self.store("shm"), offers)
        self.hold()


class Memcpy:
    """The same bytes, from one memory of this process into another.

    ``checked``: as a reader does who shares the memory of a store, checksum and header compared.
    What that costs more is what verification costs.
    """

    def __init__(self, rig: Rig, checked: bool = False) -> None:
        self._rig, self._checked = rig, checked
        self._map = mmap.mmap(-1, len(rig.pool))

    def __enter__(self) -> Run:
        """Touch it."""
        source = np.frombuffer(self._map, np.uint8)
        source[:] = 1
        size, count, rig = self._rig.size, self._rig.count, self._rig
        view, wanted = memoryview(self._map).toreadonly(), rig.wanted[0]
        header = encode(replace(rig.header(wanted), payload_checksum=checksum(view[:size])))

        def copy_one(n: int) -> None:
            start = n % count * size
            np.copyto(rig.pool[start : start + size], source[start : start + size])

        def copy_checked(n: int) -> None:
            start, target = n % count * size, rig.buffer(n % count)
            verify_block(header, wanted, target, copy_summed(target, view[start : start + size]))

        def run(total: int) -> float:
            one, began = copy_checked if self._checked else copy_one, time.perf_counter()
            for n in range(total // size):
                one(n)
            return total // size * size / (time.perf_counter() - began) / GB

        return run

    def __exit__(self, *_: object) -> None:
        """It goes with its last user."""


class Bare:
    """A plain socket and ``recv_into``, with another process that does nothing but send."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        few = min(rig.count, max(1, (64 << 20) // rig.size))
        command = [sys.executable, "-c", _SENDER, str(port), str(rig.size), str(few)]
        self._process = subprocess.Popen(command)
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


def get_rows(rig: Rig) -> dict[str, Run]:
    """With copy into the pool and verification, on each way."""

    def row(store: RemoteStore) -> Run:
        def run(total: int) -> float:
            began, done = time.perf_counter(), 0
            while done < total // rig.size:
                first = done % rig.count
                indices = range(first, min(first + GET_BLOCKS, rig.count))
                indices = indices[: total // rig.size - done]
                get_blocks(rig, store, indices)
                done += len(indices)
            return done * rig.size / (time.perf_counter() - began) / GB

        return run

    return {f"{way} get": row(rig.store(way)) for way in ORDER}


def put_rows(rig: Rig) -> dict[str, Run]:
    """New blocks, checksums made and checked, on each way."""

    def row(store: RemoteStore) -> Run:
        def run(total: int) -> float:
            offers = rig.new_offers(total // rig.size)
            began = time.perf_counter()
            for start in range(0, len(offers), PUT_BLOCKS):
                all_stored(store, offers[start : start + PUT_BLOCKS])
            return len(offers) * rig.size / (time.perf_counter() - began) / GB

        return run

    return {f"{way} put": row(rig.store(way)) for way in ORDER}


def lookup_seconds(names: int, blocks: int) -> float:
    """The median of lookups of ``names`` neighbours among ``blocks`` small blocks, with a lease."""
    with Rig(256, blocks * 256) as rig:
        store, chooser, times = rig.store("grpc"), random.Random(7), []
        for _ in range(200):
            first = chooser.randrange(blocks - names + 1)
            wanted = [wanted.name for wanted in rig.wanted[first : first + names]]
            began = time.perf_counter()
            found = store.lookup(wanted, [], 30.0, TIMEOUT)
            times.append(time.perf_counter() - began)
            store.release([found.lease] if found.lease else [], TIMEOUT)
            if found.lead != names:
                raise Corrupt("lookup", f"{found.lead} of {names} names were found")
    return sorted(times)[len(times) // 2]


def get_blocks(rig: Rig, store: Store, indices: range) -> None:
    """With copy into the pool and verification."""
    wants = [Want(rig.wanted[n].name, rig.buffer(n)) for n in indices]
    for got in store.get(wants, TIMEOUT):
        if got.header is None:
            raise Corrupt("get", "a block that was put is not there")
        verify_block(
            got.header, rig.wanted[indices[got.index]], wants[got.index].buffer, got.summed
        )


def _clock_of(pid: int) -> int:
    """The processor time of another process, as Linux numbers its clocks."""
    return ~pid << 3 | 2


def all_stored(store: Store, offers: list[Offer]) -> None:
    """Put blocks that are new."""
    outcomes = store.put(offers, TIMEOUT)
    if any(outcome.kept is not Kept.STORED for outcome in outcomes):
        raise Corrupt("put", f"not all were stored: {outcomes}")
