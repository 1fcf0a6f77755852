"""vLLM's pages as canonical blocks, head-major: ``[kv head, layer, k|v, position, head dim]``.

``PageMemory`` is what the store connector reads and writes. Blocks of vLLM may be split into
several kernel pages, one after the other. Payloads are copied: no page of vLLM is a block's bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvrelay.block.header import ITEM_BYTES
from kvrelay.engine.attention.pool import DTYPES
from kvrelay.engine.vllm.kv.border import VllmLayer
from kvrelay.engine.vllm.kv.layout import PageLayout, cache_writer
from kvrelay.errors import Unservable

INTEGERS: dict[int, torch.dtype] = {2: torch.int16, 4: torch.int32}
"""Bits of an element, by its bytes: numpy has no bfloat16."""

FEW = 4
"""Numbers in numpy's inner loop, for which its overhead is more than the copy."""


@dataclass(frozen=True, slots=True)
class PageShape:
    """One rank's cache: ``num_kv_heads`` are the heads that it holds."""

    num_blocks: int
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    def nbytes(self, count: int) -> int:
        """Bytes of the payload of ``count`` positions."""
        row = self.num_kv_heads * self.head_dim * ITEM_BYTES[self.dtype]
        return self.num_layers * 2 * count * row

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type of the cache."""
        return DTYPES[self.dtype]


class PageMemory(Protocol):
    """A ``BlockMemory`` over vLLM's cache."""

    @property
    def shape(self) -> PageShape: ...
    def nbytes(self, count: int) -> int: ...
    def read(self, block: int, count: int) -> memoryview: ...
    def write(self, block: int, count: int, payload: memoryview) -> None: ...
    def buffer(self, block: int) -> memoryview | None: ...
    def computed(self) -> None:
        """Mark the end of a step: later reads see its writes."""


class NoPages:
    """The memory of the scheduler's side, which has none: it only looks up."""

    def __init__(self, shape: PageShape) -> None:
        self.shape = shape

    def nbytes(self, count: int) -> int:
        return self.shape.nbytes(count)

    def read(self, block: int, count: int) -> memoryview:
        raise RuntimeError("vLLM's scheduler holds no KV")

    def write(self, block: int, count: int, payload: memoryview) -> None:
        raise RuntimeError("vLLM's scheduler holds no KV")

    def buffer(self, block: int) -> None:
        return None


class HostPages:
    """Pages in host memory, by numpy: no torch threads in the threads of the store connector."""

    def __init__(
        self, shape: PageShape, caches: Sequence[torch.Tensor], layout: PageLayout
    ) -> None:
        self.shape = shape
        integer = INTEGERS[ITEM_BYTES[shape.dtype]]
        bits = [cache.view(integer) for cache in caches]
        self._type = bits[0].numpy().dtype
        self._rows = [
            [_widened(layout.rows(cache, which).numpy()) for which in (0, 1)] for cache in bits
        ]
        self._size = layout.positions  # of one page
        self._pages = shape.block_size // layout.positions

    def nbytes(self, count: int) -> int:
        return self.shape.nbytes(count)

    def read(self, block: int, count: int) -> memoryview:
        payload = np.empty(self.nbytes(count), np.uint8).data
        self.read_into(block, count, payload)
        return payload.toreadonly()

    def read_into(self, block: int, count: int, payload: memoryview) -> None:
        """``read`` into memory of the caller."""
        check_length(self.shape, count, payload)
        out = np.frombuffer(payload, self._type).reshape(self._dimensions(count))
        heads, size = self.shape.num_kv_heads, self._size
        for page, first, last in self._spans(block, count):
            for layer, both in enumerate(self._rows):
                for which, rows in enumerate(both):
                    found = rows[page].reshape(heads, size, -1)[:, : last - first]
                    out[:, layer, which, first:last].view(rows.dtype)[:] = found

    def write(self, block: int, count: int, payload: memoryview) -> None:
        check_length(self.shape, count, payload)
        given = np.frombuffer(payload, self._type).reshape(self._dimensions(count))
        if count < self.shape.block_size:
            # Masked positions are multiplied by zero, and must be finite.
            whole = np.zeros(self._dimensions(self.shape.block_size), self._type)
            whole[:, :, :, :count] = given
            given = whole
        for page, first, last in self._spans(block, self.shape.block_size):
            for layer, both in enumerate(self._rows):
                for which, rows in enumerate(both):
                    source = given[:, layer, which, first:last].view(rows.dtype)
                    _copy(source.reshape(rows[page].shape), rows[page])

    def buffer(self, block: int) -> None:
        return None

    def computed(self) -> None:
        return

    def _dimensions(self, count: int) -> tuple[int, ...]:
        shape = self.shape
        return shape.num_kv_heads, shape.num_layers, 2, count, shape.head_dim

    def _spans(self, block: int, count: int) -> list[tuple[int, int, int]]:
        """Each page of a block, with the positions of the block's first ``count`` in it."""
        return page_spans(block, count, self._pages, self._size)


def _widened(rows: np.ndarray) -> np.ndarray:
    """Rows whose innermost steps, if few and side by side, are one wider number each."""
    width = rows.shape[-1] * rows.itemsize
    if width not in (4, 8) or rows.strides[-1] != rows.itemsize:
        return rows
    return rows.view(f"u{width}")[..., 0]


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    """Copy numbers; where the innermost steps of ``target`` are few, one of these after another."""
    axis = int(np.argmin(target.strides))
    if target.shape[axis] > FEW:
        target[...] = source
        return
    apart = np.moveaxis(source, axis, 0), np.moveaxis(target, axis, 0)
    for one, other in zip(*apart, strict=True):
        other[...] = one


def page_spans(block: int, count: int, pages: int, size: int) -> list[tuple[int, int, int]]:
    """Page, first and last position (exclusive) of each page that has some of ``count``."""
    firsts = range(0, count, size)
    return [
        (block * pages + number, first, min(first + size, count))
        for number, first in enumerate(firsts)
    ]


def check_length(shape: PageShape, count: int, payload: memoryview) -> None:
    """Raise ``ValueError`` for a payload of another length than ``count`` positions have."""
    if payload.nbytes != shape.nbytes(count):
        wanted = shape.nbytes(count)
        raise ValueError(f"{count} positions have {wanted} bytes, the payload {payload.nbytes}")


class DevicePages:
    """Pages in CUDA memory: a stream of its own and pinned staging, one copy at a time.

    Has not run on a GPU yet. A read waits, on the device, for the end of the last step; a write is
    complete when it returns, and so before vLLM is told that it ended.
    """

    def __init__(
        self, shape: PageShape, caches: Sequence[torch.Tensor], layout: PageLayout
    ) -> None:
        self.shape = shape
        self._rows = [[layout.rows(cache, which) for which in (0, 1)] for cache in caches]
        self._size = layout.positions
        self._pages = shape.block_size // layout.positions
        self._device = caches[0].device
        whole = (shape.num_kv_heads, shape.num_layers, 2, shape.block_size, shape.head_dim)
        self._staging = torch.empty(whole, dtype=shape.torch_dtype, pin_memory=True)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self.computed()

    def nbytes(self, count: int) -> int:
        return self.shape.nbytes(count)

    def read(self, block: int, count: int) -> memoryview:
        with self._lock, torch.cuda.stream(self._stream):
            self._stream.wait_event(self._event)
            gathered = torch.cat(
                [
                    self._page(page)[:, :, :, : last - first]
                    for page, first, last in page_spans(block, count, self._pages, self._size)
                ],
                dim=3,
            )
            staging = self._staging.view(-1)[: gathered.numel()].view(gathered.shape)
            staging.copy_(gathered, non_blocking=True)
            self._stream.synchronize()
            return memoryview(staging.view(torch.uint8).numpy().tobytes())

    def _page(self, page: int) -> torch.Tensor:
        """One page of all layers: ``[head, layer, k|v, position, dim]``."""
        whole = (self.shape.num_kv_heads, self._size, self.shape.head_dim)
        layers = [torch.stack([one[page].reshape(whole) for one in two], 1) for two in self._rows]
        return torch.stack(layers, 1)

    def write(self, block: int, count: int, payload: memoryview) -> None:
        check_length(self.shape, count, payload)
        with self._lock, torch.cuda.stream(self._stream):
            self._stream.wait_event(self._event)
            self._staging.zero_()
            given = torch.frombuffer(bytearray(payload), dtype=self.shape.torch_dtype)
            heads, layers, dim = self.shape.num_kv_heads, self.shape.num_layers, self.shape.head_dim
            self._staging[:, :, :, :count] = given.view(heads, layers, 2, count, dim)
            device = self._staging.to(self._device, non_blocking=True)
            for page, first, last in page_spans(
                block, self.shape.block_size, self._pages, self._size
            ):
                for layer, rows in enumerate(self._rows):
                    for which, one in enumerate(rows):
                        target = one[page]
                        target.copy_(device[:, layer, which, first:last].reshape(target.shape))
            self._stream.synchronize()

    def buffer(self, block: int) -> None:
        return None

    def computed(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))


def open_pages(shape: PageShape, caches: Sequence[torch.Tensor], layout: PageLayout) -> PageMemory:
    """The pages of a cache, wherever it is."""
    if caches[0].device.type == "cpu":
        return HostPages(shape, caches, layout)
    return DevicePages(shape, caches, layout)


def check_pages(
    pages: PageMemory, layers: Sequence[VllmLayer], caches: Sequence[torch.Tensor]
) -> None:
    """Random K and V of every layer, through vLLM's own cache update and back through ``pages``.

    Uses block 0, which vLLM gives to no request. Raises ``Unservable`` if a byte differs.
    """
    shape = pages.shape
    random = torch.Generator().manual_seed(5)
    size = (2, shape.block_size, shape.num_kv_heads, shape.head_dim)
    expected = []
    for layer, cache in zip(layers, caches, strict=True):
        both = torch.randn(size, generator=random).to(cache.dtype)
        write = cache_writer(layer, cache, shape.block_size)
        write(both[0].to(cache.device), both[1].to(cache.device))
        expected.append(both)
    wanted = torch.stack(expected).permute(3, 0, 1, 2, 4)  # head, layer, k|v, position, dim
    for count in (shape.block_size, shape.block_size - 1 or 1):
        payload = wanted[:, :, :, :count].contiguous().view(torch.uint8).numpy().reshape(-1).data
        for what in ("update", "own write"):
            if pages.read(0, count) != payload:
                raise Unservable(
                    f"K and V that vLLM's cache {what} wrote are not read back byte for byte:"
                    f" {type(layers[0].impl).__name__} has another layout than was learned"
                )
            pages.write(0, count, payload)
    for cache in caches:
        pages_of_block = cache.shape[0] // shape.num_blocks
        cache[:pages_of_block].zero_()
