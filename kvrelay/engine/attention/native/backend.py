"""Paged attention by the compiled kernel: the pool is read where it is, through block tables.

A row has the same bits wherever a prompt is cut, whatever is beside it, and on any number of
threads, without padding; plain.cpp defines it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.attention.batch import Batch
from kvrelay.engine.attention.native.arguments import KernelArguments, arguments_of_pool
from kvrelay.engine.attention.native.library import Function, NoKernel, load_kernel
from kvrelay.engine.attention.pool import KVPool


class NativeBackend:
    """The kernel over a pool in host memory; ``NoKernel`` if this machine has none."""

    name = "native"

    def __init__(self, pool: KVPool) -> None:
        if pool.device.type != "cpu":
            raise NoKernel(f"it computes on the CPU, and the pool is on {pool.device}")
        self.pool = pool
        self.kernel = load_kernel()
        self._template = arguments_of_pool(pool.tensor)
        self._template.parallel = self.kernel.parallel

    @property
    def profile(self) -> str:
        """Backend, revision and variant."""
        return self.kernel.profile

    def step(self, batch: Batch) -> NativeStep:
        """The block tables and spans of the batch, as the kernel reads them."""
        works = (*batch.decodes, *batch.prefills)
        entries = np.empty((len(works), 4), np.int64)
        entries[:, 1] = [work.start for work in works]
        entries[:, 2] = [work.count for work in works]
        entries[:, 0] = np.cumsum(entries[:, 2]) - entries[:, 2]
        lengths = np.array([len(table) for table in batch.tables], np.int64)
        entries[:, 3] = np.cumsum(lengths) - lengths
        tables = np.fromiter(chain.from_iterable(batch.tables), np.int32, int(lengths.sum()))
        arguments = KernelArguments.from_buffer_copy(self._template)
        arguments.n = len(works)
        arguments.entries = entries.ctypes.data
        arguments.tables = tables.ctypes.data
        arguments.threads = torch.get_num_threads()
        rows = int(entries[:, 2].sum())
        return NativeStep(self.pool.tensor, rows, arguments, self.kernel.function, entries, tables)


@dataclass(frozen=True, slots=True)
class NativeStep:
    """One step over the pool; see ``AttentionStep``. It owns what its arguments point to."""

    pool: torch.Tensor
    rows: int
    arguments: KernelArguments
    function: Function
    entries: NDArray[np.int64]
    tables: NDArray[np.int32]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """Store, then attend, in one call of the kernel."""
        a = self.arguments
        query, key, value = _rows(query), _rows(key), _rows(value)
        self._check(layer, query, key, value)
        out = torch.empty(query.shape, dtype=query.dtype)
        a.layer = layer
        a.group = query.shape[1] // a.kv_heads
        a.scale = a.dim**-0.5 if scaling is None else scaling
        a.query = query.data_ptr()
        a.key = key.data_ptr()
        a.value = value.data_ptr()
        a.out = out.data_ptr()
        a.q_row, a.q_head, _ = query.stride()
        a.k_row, a.k_head, _ = key.stride()
        a.v_row, a.v_head, _ = value.stride()
        a.o_row, a.o_head, _ = out.stride()
        if self.function(a) != 0:
            raise MemoryError("attention")
        return out

    def _check(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """The kernel would read or write outside what does not have these shapes."""
        pool = self.pool
        heads, width = pool.shape[4], pool.shape[5]
        fits = (
            0 <= layer < pool.shape[1]
            and query.shape == (self.rows, query.shape[1] // heads * heads, width)
            and key.shape == value.shape == (self.rows, heads, width)
            and query.dtype == key.dtype == value.dtype == pool.dtype
        )
        if not fits:
            shapes = [(tuple(one.shape), one.dtype) for one in (query, key, value)]
            raise ValueError(f"layer {layer}, {shapes}: not of this pool and {self.rows} rows")


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, its last dimension without gaps."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
