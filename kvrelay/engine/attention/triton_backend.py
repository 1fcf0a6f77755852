"""Paged attention by Triton's kernels, on a CUDA device.

Has not run on a GPU yet: it has been interpreted and compiled (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.attention.batch import Batch, ModelInputs, positions_of
from kvrelay.engine.attention.pool import KVPool
from kvrelay.engine.cuda.arguments import AttentionOptions
from kvrelay.engine.cuda.launch import unusable
from kvrelay.engine.cuda.upload import StepUpload

if TYPE_CHECKING:  # they import triton, which is found only where the backend is usable
    from kvrelay.engine.cuda.attention import PagedEntries, PagedPool


_ROW_WORDS = 64  # of a decode row: span, token, position, slot, and what its sampling needs


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

        from kvrelay.engine.cuda.attention import REVISION, PagedPool

        self.pool = pool
        self.paged = PagedPool(pool.by_position)
        self.options = AttentionOptions()
        self.profile = f"triton-{REVISION}-{triton.__version__}"
        self._upload = StepUpload(pool.device)
        self._for_graphs: StepUpload | None = None

    def reserve(self, rows: int, positions: int) -> None:
        """Make the buffer that graphs read, for so many rows with contexts of so many positions."""
        blocks = -(positions // -self.pool.shape.block_size)
        self._for_graphs = StepUpload(self.pool.device, rows * (_ROW_WORDS + blocks))

    def step(self, batch: Batch, longest: int | None = None) -> TritonStep:
        """Upload all that the step reads, its tokens included, in one copy.

        ``longest``, of a step for a graph, is the context that its entries may have at most.
        """
        from kvrelay.engine.cuda.attention import PagedEntries

        blocks, decodes = batch.blocks, batch.decodes
        if blocks.min() < 0 or blocks.max() >= self.pool.shape.num_blocks:
            raise IndexError(f"a block table leaves the pool of {self.pool.shape.num_blocks}")
        narrow = (batch.spans, batch.tokens[None], batch.positions[None], batch.logit_rows)
        slots = slots_of(batch.spans, blocks, self.pool.shape.block_size)
        padded = np.pad(slots, (0, len(batch.tokens) - len(slots)), constant_values=-1)
        parts = [*(part.astype(np.int32) for part in narrow), padded, blocks]
        sent = self._send(parts, batch.words, None if longest is None else self._for_graphs)
        spans, tokens, positions, rows, where, tables, *words = sent
        if longest is None:
            longest = int(batch.lengths[:decodes].max()) if decodes else 0
        entries = PagedEntries(
            spans=spans,
            slots=where,
            blocks=tables,
            decodes=decodes,
            prefill_rows=len(padded) - decodes,
            longest=longest,
        )
        inputs = ModelInputs(tokens, positions, rows, tuple(words))
        return TritonStep(inputs, self.paged, entries, self.options)

    def _send(
        self,
        parts: Sequence[NDArray[np.int32]],
        words: Sequence[NDArray[np.int32]],
        fixed: StepUpload | None,
    ) -> list[torch.Tensor]:
        """The parts and words on the device; the parts in the ``fixed`` buffer, if there is one.

        Penalties may have more words than that holds. No graph reads them.
        """
        if fixed is None or fixed.holds([*parts, *words]):
            return (fixed or self._upload).send([*parts, *words])
        if not fixed.holds(parts):
            raise ValueError("a decode step has longer tables than its graph has room for")
        return [*fixed.send(parts), *self._upload.send(words)]


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

    inputs: ModelInputs
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
