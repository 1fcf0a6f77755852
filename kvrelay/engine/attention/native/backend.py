"""Paged attention by the compiled kernel: the pool is read where it is, through block tables.

The bits of a row do not depend on where a prompt is cut, on the other rows or on the number of
threads, without padding; plain.cpp defines them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvrelay.engine.attention.batch import Batch, ModelInputs
from kvrelay.engine.attention.native.arguments import CALL, KernelArguments, arguments_of_pool
from kvrelay.engine.attention.native.library import Function, NoKernel, load_kernel, products_of
from kvrelay.engine.attention.native.products import NoProducts
from kvrelay.engine.attention.native.rows import RowKernels
from kvrelay.engine.attention.pool import KVPool
from kvrelay.process.shared_cores import CoresView


class NativeBackend:
    """The kernel over a pool in host memory; ``NoKernel`` if this machine has none."""

    name = "native"

    def __init__(self, pool: KVPool) -> None:
        if pool.device.type != "cpu":
            raise NoKernel(f"it computes on the CPU, and the pool is on {pool.device}")
        self.pool = pool
        self.kernel = load_kernel()
        try:
            self._template = arguments_of_pool(pool.by_position)
        except ValueError as error:
            raise NoKernel(str(error)) from error
        self._template.parallel = self.kernel.parallel
        self.shared: CoresView | None = None  # with other workers
        pads = isinstance(products_of(pool.tensor.dtype), NoProducts)
        self.rows = RowKernels(self.kernel.rows, self.kernel.parallel, pads)

    @property
    def profile(self) -> str:
        """Backend, revision and variant."""
        return self.kernel.profile

    def step(self, batch: Batch) -> NativeStep:
        """The kernel reads the spans and block tables of the batch where they are."""
        blocks = batch.blocks
        largest = blocks.view(np.uint32).max()  # a negative number is a large one here
        if largest >= self.pool.shape.num_blocks:
            raise IndexError(f"a block table leaves the pool of {self.pool.shape.num_blocks}")
        arguments = KernelArguments.from_buffer_copy(self._template)
        arguments.n = len(batch.spans)
        arguments.entries = batch.spans.ctypes.data
        arguments.tables = blocks.ctypes.data
        arguments.threads = torch.get_num_threads()
        shape = self.pool.shape
        return NativeStep(
            inputs=batch.inputs(self.pool.device),
            layers=shape.num_layers,
            rows=len(batch.tokens),
            heads=shape.num_kv_heads,
            width=shape.head_dim,
            dtype=self.pool.tensor.dtype,
            kernels=self.rows,
            arguments=arguments,
            function=self.kernel.function,
            shared=self.shared,
            owned=(batch, self.pool.tensor),
        )


@dataclass(frozen=True, slots=True)
class NativeStep:
    """One step; see ``AttentionStep``. ``owned`` keeps alive what its arguments point to."""

    inputs: ModelInputs
    layers: int
    rows: int
    heads: int  # of K and V
    width: int
    dtype: torch.dtype
    kernels: RowKernels
    arguments: KernelArguments
    function: Function
    shared: CoresView | None
    owned: tuple[Batch, torch.Tensor]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """Store, then attend, in one call of the kernel."""
        q_row, q_head, q_one = query.stride()
        k_row, k_head, k_one = key.stride()
        v_row, v_head, v_one = value.stride()
        if self.width > 1 and not q_one == k_one == v_one == 1:
            compact = (query.contiguous(), key.contiguous(), value.contiguous())
            return self.attend(layer, *compact, scaling)
        width, shape, kept = self.width, query.shape, (self.rows, self.heads, self.width)
        members = shape[1]
        scale = width**-0.5 if scaling is None else scaling
        fits = (
            scale > 0
            and shape == (self.rows, members, width)
            and members % self.heads == 0
            and key.shape == kept
            and value.shape == kept
            and 0 <= layer < self.layers
            and query.dtype is key.dtype is value.dtype is self.dtype
        )
        if not fits:  # the kernel would read or write elsewhere
            shapes = [(tuple(one.shape), one.dtype) for one in (query, key, value)]
            raise ValueError(
                f"layer {layer}, scaling {scale}, {shapes}: not of this pool and {self.rows} rows"
            )
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        self._call(
            *(layer, members // self.heads, scale),
            *(query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()),
            *(q_row, q_head, k_row, k_head, v_row, v_head, members * width, width),
        )
        return out

    def attend_joint(
        self, layer: int, joint: torch.Tensor, queries: int, scale: float
    ) -> torch.Tensor:
        """Store and attend heads that lie side by side in each row: Q, then K, then V.

        There may be more rows than those of the step. Returns ``RowKernels.room``.
        """
        width = self.width
        row = (queries + 2 * self.heads) * width
        fits = (
            scale > 0
            and joint.is_contiguous()
            and joint.shape[1] == row
            and joint.shape[0] >= self.rows
            and queries % self.heads == 0
            and 0 <= layer < self.layers
            and joint.dtype is self.dtype
        )
        if not fits:  # the kernel would read or write elsewhere
            raise ValueError(f"layer {layer}, {tuple(joint.shape)}: not of {self.rows} rows")
        out = self.kernels.room(self.rows, queries * width, self.dtype)
        query = joint.data_ptr()
        key = query + queries * width * self.dtype.itemsize
        value = key + self.heads * width * self.dtype.itemsize
        self._call(
            *(layer, queries // self.heads, scale, query, key, value, out.data_ptr()),
            *(row, width, row, width, row, width, queries * width, width),
        )
        return out

    def _call(self, *fields: float) -> None:
        CALL.pack_into(self.arguments, 0, *fields)
        if self.function(self.arguments) != 0:
            raise MemoryError("attention")
