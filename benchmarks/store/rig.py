"""The setup that the store's rows are measured on: a store, blocks, and a pool."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType

import numpy as np

from benchmarks.store.child import start_child
from kvrelay.block.header import ExpectedBlock, Header, encode_fields, header_bytes
from kvrelay.block.mac import BlockKey
from kvrelay.block.name import child_name
from kvrelay.block.verify import verify_block
from kvrelay.errors import Corrupt, Unavailable
from kvstore.base import Block, Lease, NameQuery, Offer, PutStatus, Store, Want
from kvstore.client.remote import RemoteStore
from kvstore.client.transports.selector import TRANSPORTS
from kvstore.limits import MAX_NAMES
from kvstore.server.block_store import ENTRY_BYTES

GET_BLOCKS = 256
FILL_BYTES = 4 << 20
PUT_BLOCKS = 32
TIMEOUT = 120.0
HOLD_SECONDS = 600.0
TOKENS = tuple(range(16))
HEADS = 8
SPACE = b"bench".ljust(32, b"\0")
GB = 1e9

Run = Callable[[int], float]
"""Bytes to move in; bytes per second / 1e9 out."""


class StoreRig:
    """A store as a process, full of blocks of ``size``, and a pool as large as all of them."""

    def __init__(self, size: int, working_set: int, key: BlockKey | None = None) -> None:
        """``key``: blocks are signed with it, and it is checked."""
        self.size = size
        self.key = key
        self.count = working_set // size
        self.pool = np.random.default_rng(7).integers(0, 256, self.count * size, np.uint8)
        self.block_bytes = header_bytes(len(TOKENS), HEADS) + size
        budget = 2 * self.count * (self.block_bytes + ENTRY_BYTES) + (8 << 20)
        command = [sys.executable, "-P", "-m", "kvstore", f"--budget={budget}", "--log-level=error"]
        self._process = start_child(command, subprocess.PIPE)
        self._leases: list[Lease] = []
        self.others: list[int] = []  # processes of other stores that are measured beside ours
        self._parents = (n.to_bytes(32, "little") for n in itertools.count(1))
        self.wanted = [self._wanted() for _ in range(self.count)]
        self._stores: dict[str, RemoteStore] = {}

    def __enter__(self) -> StoreRig:
        """Fill the store; on any error it is ended."""
        try:
            line = self._process.stdout.readline() if self._process.stdout else ""
            if not line.startswith("store ready at "):
                raise Unavailable(f"the store did not start: {line!r}")
            self.address = line.split()[3].rstrip(",")
            self._stores = {
                transport: RemoteStore(self.address, transport) for transport in TRANSPORTS
            }
            self._fill()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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

    def store(self, transport: str) -> RemoteStore:
        """A client of the store over this transport."""
        return self._stores[transport]

    def buffer(self, index: int) -> memoryview:
        """Where a block lies in the pool."""
        start = index * self.size
        return self.pool.data[start : start + self.size]

    def hold(self) -> None:
        """Lease the blocks that are read, so that puts do not evict them."""
        store, leases = self.store("grpc"), []
        for start in range(0, self.count, MAX_NAMES):
            names = [wanted.name for wanted in self.wanted[start : start + MAX_NAMES]]
            held = store.lookup(NameQuery(names, ttl=HOLD_SECONDS), TIMEOUT)
            if held.lead != len(names) or held.lease is None:
                raise Corrupt("lookup", f"{held.lead} of {len(names)} blocks are there")
            leases.append(held.lease)
        store.release(self._leases, TIMEOUT)
        self._leases = leases

    def offer(self, index: int, wanted: ExpectedBlock) -> Offer:
        """To put the block in the pool at ``index``; its header is made when it is read."""
        payload = self.buffer(index)

        def read() -> Block:
            return Block(
                encode_fields(wanted, self.size, None), payload, sealed=False, key=self.key
            )

        return Offer(wanted.name, self.block_bytes, False, read)

    def header(self, wanted: ExpectedBlock) -> Header:
        """Of a block, without the checksums of its payload."""
        sums = (0,) * HEADS
        return Header(
            SPACE, wanted.parent, wanted.name, TOKENS, "uint8", wanted.shape, self.size, sums
        )

    def new_offers(self, count: int) -> list[Offer]:
        """Blocks the store does not have yet."""
        return [self.offer(n % self.count, self._wanted()) for n in range(count)]

    def _wanted(self) -> ExpectedBlock:
        parent = next(self._parents)
        name = child_name(SPACE, parent, TOKENS)
        return ExpectedBlock(SPACE, parent, name, TOKENS, "uint8", (HEADS, self.size // HEADS))

    def _fill(self) -> None:
        step = max(PUT_BLOCKS, FILL_BYTES // self.block_bytes)
        for start in range(0, self.count, step):
            end = min(start + step, self.count)
            offers = [self.offer(n, self.wanted[n]) for n in range(start, end)]
            all_stored(self.store("shm"), offers)
        self.hold()


def get_blocks(rig: StoreRig, store: Store, indices: range) -> None:
    """With copy into the pool and verification."""
    wants = [Want(rig.wanted[n].name, rig.buffer(n), key=rig.key) for n in indices]
    for got in store.get(wants, TIMEOUT):
        if got.header is None:
            raise Corrupt("get", "a block that was put is not there")
        wanted = rig.wanted[indices[got.index]]
        verify_block(got.header, wanted, wants[got.index].buffer, got.summed, rig.key)


def all_stored(store: Store, offers: list[Offer]) -> None:
    """Put blocks that are new."""
    outcomes = store.put(offers, TIMEOUT)
    if any(outcome.status is not PutStatus.STORED for outcome in outcomes):
        raise Corrupt("put", f"not all were stored: {outcomes}")


def _clock_of(pid: int) -> int:
    """The processor time of another process, as Linux numbers its clocks."""
    return ~pid << 3 | 2
