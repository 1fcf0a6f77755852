"""Copies the bytes of a pool's blocks in and out, for I/O threads: host memory and CUDA."""

from __future__ import annotations

import threading

import numpy as np
import torch


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
    """Bytes of blocks in CUDA memory: a stream of its own and pinned staging, one copy at a time.

    Has not run on a GPU yet. A read waits, on the device, for the end of the last
    step; a write is complete when it returns, and so before any step that could use it is launched.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        blocks, heads, layers, two, size = tensor.shape[:5]
        self._bytes = tensor.view(torch.uint8).view(blocks, heads * layers * two, size, -1)
        self._staging = torch.empty(self._bytes.shape[1:], dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self.computed()

    def read(self, block: int, count: int) -> memoryview:
        source = self._bytes[block, :, :count]
        with self._lock, torch.cuda.stream(self._stream):
            self._stream.wait_event(self._event)
            staging = self._staging.view(-1)[: source.numel()].view(source.shape)
            # Compact on the device first, so that the transfer is one contiguous copy.
            staging.copy_(source.contiguous(), non_blocking=True)
            self._stream.synchronize()
            return memoryview(staging.numpy().tobytes())

    def write(self, block: int, count: int, payload: memoryview) -> None:
        target = self._bytes[block, :, :count]
        with self._lock, torch.cuda.stream(self._stream):
            self._stream.wait_event(self._event)
            staging = self._staging.view(-1)[: target.numel()].view(target.shape)
            staging.numpy()[...] = np.frombuffer(payload, np.uint8).reshape(target.shape)
            target.copy_(staging.to(target.device, non_blocking=True))
            self._bytes[block, :, count:] = 0
            self._stream.synchronize()

    def buffer(self, block: int) -> None:
        return None

    def computed(self) -> None:
        self._event.record(torch.cuda.current_stream(self._bytes.device))
