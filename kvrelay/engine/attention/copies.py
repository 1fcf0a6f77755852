"""Copies the bytes of a pool's blocks in and out, for I/O threads: host memory and CUDA."""

from __future__ import annotations

import numpy as np
import torch

from kvrelay.engine.cuda.copies import BlockCopies


class HostBlockCopier:
    """Bytes of blocks in host memory, by numpy: no torch threads in the caller's thread."""

    def __init__(self, tensor: torch.Tensor) -> None:
        blocks, heads, layers, two, size = tensor.shape[:5]
        flat = tensor.view(torch.uint8).numpy()
        self._bytes = flat.reshape(blocks, heads * layers * two, size, -1)
        self._flat = flat.reshape(-1).data
        self._block_bytes = self._flat.nbytes // blocks
        self._size = size

    def read(self, block: int, count: int) -> memoryview:
        if count == self._size:
            return self.buffer(block).toreadonly()
        return self._bytes[block, :, :count].reshape(-1).data.toreadonly()

    def write(self, block: int, count: int, payload: memoryview) -> None:
        target = self._bytes[block, :, :count]
        target[...] = np.frombuffer(payload, np.uint8).reshape(target.shape)
        self._bytes[block, :, count:] = 0

    def buffer(self, block: int) -> memoryview:
        return self._flat[block * self._block_bytes : (block + 1) * self._block_bytes]

    def computed(self) -> None:
        return


class DeviceBlockCopier:
    """Bytes of single blocks in CUDA memory, as batches of one block. Has not run on a GPU yet.

    A write is complete when it returns, and so before any step that could use it is launched.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.batches = BlockCopies(tensor)

    def read(self, block: int, count: int) -> memoryview:
        with self.batches.saving() as batch:
            copied = batch.save(block, count, None)
            assert copied is not None
            batch.settle()
            return memoryview(bytes(copied.payload))

    def write(self, block: int, count: int, payload: memoryview) -> None:
        with self.batches.loading() as batch:
            slot = batch.slot()
            assert slot is not None
            pinned = slot[: payload.nbytes]
            pinned[:] = payload.cast("B")
            started = batch.load(block, count, pinned)
            assert started

    def buffer(self, block: int) -> None:
        return None

    def computed(self) -> None:
        self.batches.computed()
