"""Paged attention by Triton's kernels, on a CUDA device.

Has not run on a GPU yet: it has been interpreted and compiled (docs/gpu.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.attention.batch import Batch, positions_of
from kvrelay.engine.attention.pool import KVPool
from kvrelay.engine.cuda.launch import unusable

if TYPE_CHECKING:  # they import triton, which is found only where the backend is usable
    from kvrelay.engine.cuda.attention import AttentionOptions, PagedEntries, PagedPool


class NoTriton(Exception):
    """Why the kernels cannot run here, in words for people."""


class TritonBackend:
    """The kernels over a pool; ``NoTriton`` if this process cannot run them."""

    name = "triton"

    def __init__(self, pool: KVPool) -> None:
        reason = unusable(pool.device)
        if reason is not None:
            raise NoTriton(reason)
        import triton

        from kvrelay.engine.cuda.attention import REVISION, AttentionOptions, PagedPool

        self.pool = pool
        self.paged = PagedPool(pool.by_position)
        self.options = AttentionOptions()
        self.profile = f"triton-{REVISION}-{triton.__version__}"

    def step(self, batch: Batch) -> TritonStep:
        """Upload spans, block tables and slots in one copy."""
        from kvrelay.engine.cuda.attention import PagedEntries

        blocks, decodes = batch.blocks, batch.decodes
        if blocks.min() < 0 or blocks.max() >= self.pool.shape.num_blocks:
            raise IndexError(f"a block table leaves the pool of {self.pool.shape.num_blocks}")
        spans = batch.spans.astype(np.int32)
        slots = slots_of(batch.spans, blocks, self.pool.shape.block_size)
        upload = np.concatenate((spans.reshape(-1), slots, blocks))
        there = torch.from_numpy(upload).to(self.pool.device, non_blocking=True)
        slots_end = spans.size + len(slots)
        entries = PagedEntries(
            spans=there[: spans.size].view(spans.shape),
            slots=there[spans.size : slots_end],
            blocks=there[slots_end:],
            decodes=decodes,
            prefill_rows=len(slots) - decodes,
            longest=int(batch.lengths[:decodes].max()) if decodes else 0,
        )
        return TritonStep(self.paged, entries, self.options)


def slots_of(
    spans: NDArray[np.int64], blocks: NDArray[np.int32], block_size: int
) -> NDArray[np.int32]:
    """Where each packed row's K and V lie: block * block size + offset."""
    at, offsets = np.divmod(positions_of(spans), block_size)
    slots: NDArray[np.int64] = (
        blocks[at + np.repeat(spans[:, 3], spans[:, 2])].astype(np.int64) * block_size + offsets
    )
    narrow: NDArray[np.int32] = slots.astype(np.int32)
    return narrow


@dataclass(frozen=True, slots=True)
class TritonStep:
    """One step; see ``AttentionStep``. A forward pass with kernels of its own takes the parts."""

    pool: PagedPool
    entries: PagedEntries
    options: AttentionOptions

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """Store, then attend."""
        if not query.stride(2) == key.stride(2) == value.stride(2) == 1:
            compact = (query.contiguous(), key.contiguous(), value.contiguous())
            return self.attend(layer, *compact, scaling)
        kept = (self.entries.slots.shape[0], self.pool.kv_heads, self.pool.dim)
        fits = (
            query.shape[::2] == kept[::2]
            and query.shape[1] % kept[1] == 0
            and key.shape == value.shape == kept
            and 0 <= layer < self.pool.tensor.shape[1]
            and query.dtype is key.dtype is value.dtype is self.pool.tensor.dtype
        )
        if not fits:  # the kernels would read or write elsewhere
            shapes = [(tuple(one.shape), one.dtype) for one in (query, key, value)]
            raise ValueError(f"layer {layer}, {shapes}: not of this pool and {kept[0]} rows")
        self.pool.store(layer, self.entries.slots, key, value)
        return self.attend_stored(layer, query, scaling)

    def attend_stored(self, layer: int, query: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """Attend Q whose K and V are in the pool already."""
        scale = self.pool.dim**-0.5 if scaling is None else scaling
        return self.pool.attend(layer, query, self.entries, scale, self.options)
