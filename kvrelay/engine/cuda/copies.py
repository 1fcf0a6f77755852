"""Batches of copies between the blocks of a pool on a device and host memory.

A block is contiguous in the pool, so its copy is one DMA. Loads and saves have a CUDA stream each.
On the device a batch starts after the last step; one event tells the host that it has ended. Host
memory is registered with the driver, or pinned: a batch takes a slab, which is made if all others
are in use. Has not run on a GPU yet.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.cuda.registration import Mapping, RegisteredMemory, address_of

SLAB_BYTES = 64 << 20
MOST_SLOTS = 4096
FEWEST_SLOTS = 4


@dataclass(frozen=True, slots=True)
class BlockOnHost:
    """A block on its way to the host: ``payload`` is valid from ``settle`` until ``recycle``.

    ``placed``: it is in the caller's target. ``turn``: the batch's ``turn`` when the copy started.
    """

    payload: memoryview
    placed: bool
    turn: int


class _Slab:
    """Pinned memory for several blocks."""

    def __init__(self, slots: int, block_bytes: int) -> None:
        self._memory = torch.empty(slots * block_bytes, dtype=torch.uint8, pin_memory=True)
        whole = self._memory.numpy().data
        self.slots = [whole[n * block_bytes :][:block_bytes] for n in range(slots)]
        self._address = address_of(whole)
        self._size = whole.nbytes

    def holds(self, address: int, size: int) -> bool:
        return self._address <= address and address + size <= self._address + self._size


class BlockCopies:
    """The copies of one pool. ``registered``: host memory besides slabs that the device reaches."""

    def __init__(self, pool: torch.Tensor, registered: RegisteredMemory | None = None) -> None:
        count, heads, layers, two, size = pool.shape[:5]
        self.blocks = pool.view(torch.uint8).view(count, -1)
        self.positions = size
        self.runs = heads * layers * two
        self.registered = registered or RegisteredMemory()
        self._slots = min(max(SLAB_BYTES // self.block_bytes, FEWEST_SLOTS), MOST_SLOTS)
        self._loads = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._saves = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self.step_ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._idle: list[_Slab] = []
        self.computed()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.blocks.shape[1]

    @property
    def most_blocks(self) -> int:
        """The most blocks of a batch of loads; the partial one among them takes two slots."""
        return self._slots - 1

    def computed(self) -> None:
        """Make later batches wait for the step that was launched last."""
        self.step_ended.record(torch.cuda.current_stream(self.blocks.device))

    def loading(self) -> DeviceBatch:
        """A batch of copies to the device."""
        return DeviceBatch(self, self._loads)

    def saving(self) -> DeviceBatch:
        """A batch of copies to the host."""
        return DeviceBatch(self, self._saves)

    def take_slab(self) -> _Slab:
        """Pinned memory for one batch; a new slab only if all others are in use."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Slab(self._slots, self.block_bytes)

    def give_slab(self, slab: _Slab) -> None:
        """Return a slab that no copy uses any more."""
        with self._lock:
            self._idle.append(slab)


class DeviceBatch:
    """Copies of one thread in one direction; leaving the ``with`` waits for them."""

    background = True

    def __init__(self, copies: BlockCopies, stream: torch.cuda.Stream) -> None:
        self._copies = copies
        self._stream = stream
        self._ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._slab: _Slab | None = None
        self._taken = 0
        self._running = False
        self._used: list[Mapping] = []
        self._after: list[Callable[[], None]] = []
        self.turn = 0

    def __enter__(self) -> DeviceBatch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.settle()
        self.recycle()
        if self._slab is not None:
            self._copies.give_slab(self._slab)
            self._slab = None

    def slot(self) -> memoryview | None:
        """Pinned memory of a block's size, for this batch; ``None`` if all slots are taken."""
        if self._slab is None:
            self._slab = self._copies.take_slab()
        if self._taken == len(self._slab.slots):
            return None
        self._taken += 1
        return self._slab.slots[self._taken - 1]

    def load(self, block: int, count: int, payload: memoryview) -> bool:
        """Start to fill a block's first ``count`` positions; the rest becomes zero.

        Returns ``False``, having started nothing, if the device cannot read the payload's memory or
        no slot is free.
        """
        if count < self._copies.positions:
            whole = self.slot()
            if whole is None:
                return False
            rows = self._rows(whole)
            rows[:, count:] = 0
            rows[:, :count] = self._rows(payload)
            payload = whole
        if not self._reaches(payload, write=False):
            return False
        self._start(self._copies.blocks[block], tensor_at(payload))
        return True

    def save(self, block: int, count: int, target: memoryview | None) -> BlockOnHost | None:
        """Start to copy a block's first ``count`` positions to ``target``, or else to a slot.

        ``None`` if no slot is free.
        """
        copies = self._copies
        part = count < copies.positions
        if not part and target is not None and self._reaches(target, write=True):
            self._start(tensor_at(target), copies.blocks[block])
            return BlockOnHost(target, True, self.turn)
        slots = [self.slot() for _ in range(1 + part)]
        whole, payload = slots[0], slots[-1]
        if whole is None or payload is None:
            return None
        self._start(tensor_at(whole), copies.blocks[block])
        if part:
            payload = payload[: payload.nbytes // copies.positions * count]
            self._after.append(_cut(self._rows(payload), self._rows(whole), count))
        return BlockOnHost(payload, False, self.turn)

    def settle(self) -> None:
        """Wait until every copy that was started has ended."""
        if self._running:
            self._ended.record(self._stream)
            self._ended.synchronize()
            self._running = False
        for cut in self._after:
            cut()
        self._after.clear()
        for used in self._used:
            self._copies.registered.release(used)
        self._used.clear()

    def recycle(self) -> None:
        """Free the slots of this batch, whose copies have ended."""
        self._taken = 0
        self.turn += 1

    def _reaches(self, view: memoryview, write: bool) -> bool:
        """Whether the device can copy to or from this memory; keeps it so until ``settle``."""
        address, size = address_of(view), view.nbytes
        if self._slab is not None and self._slab.holds(address, size):
            return True
        if any(used.holds(address, size) and used.writable >= write for used in self._used):
            return True
        used = self._copies.registered.use(address, size, write)
        if used is None:
            return False
        self._used.append(used)
        return True

    def _start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            if not self._running:
                self._running = True
                self._stream.wait_event(self._copies.step_ended)
            target.copy_(source, non_blocking=True)

    def _rows(self, payload: memoryview) -> NDArray[np.uint8]:
        """[run, positions, bytes of a position] of a payload."""
        row = self._copies.block_bytes // (self._copies.runs * self._copies.positions)
        return np.frombuffer(payload, np.uint8).reshape(self._copies.runs, -1, row)


def _cut(target: NDArray[np.uint8], source: NDArray[np.uint8], count: int) -> Callable[[], None]:
    def cut() -> None:
        target[...] = source[:, :count]

    return cut


def tensor_at(view: memoryview) -> torch.Tensor:
    """The memory of a view as a tensor, without a copy. A read-only view must not be written."""
    there = (ctypes.c_ubyte * view.nbytes).from_address(address_of(view))
    return torch.frombuffer(there, dtype=torch.uint8)
