"""Paged attention by another library's FlashAttention 2, on a CUDA device.

The library reads K and V in the pool, by its strides. Has not run on a GPU yet (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.attention.batch import Batch, ModelInputs
from kvrelay.engine.attention.flash_calls import FlashCalls, FlashEntries
from kvrelay.engine.attention.pool import KVPool, PoolShape
from kvrelay.engine.attention.triton_backend import slots_of
from kvrelay.engine.cuda.flash_conditions import ALIGNED
from kvrelay.engine.cuda.upload import StepUpload


class FlashBackend:
    """The calls of one library over a pool."""

    def __init__(self, pool: KVPool, calls: FlashCalls) -> None:
        self.pool = pool
        self.name = calls.name
        self.profile = calls.profile
        self._calls = calls
        self._upload = StepUpload(pool.device)

    def step(self, batch: Batch) -> FlashStep:
        """Upload tokens, tables and sampling parameters of a step in one copy."""
        blocks, decodes = batch.blocks, batch.decodes
        if blocks.min() < 0 or blocks.max() >= self.pool.shape.num_blocks:
            raise IndexError(f"a block table leaves the pool of {self.pool.shape.num_blocks}")
        shape = self.pool.shape
        size = shape.block_size
        groups = [
            _Group.of(batch, slice(0, decodes), size),
            _Group.of(batch, slice(decodes, None), size),
        ]
        narrow = (batch.tokens[None], batch.positions[None], batch.logit_rows)
        places = _places(slots_of(batch.spans, blocks, size), shape).view(np.int32)
        parts = [*(part.astype(np.int32) for part in narrow), places]
        for group in groups:
            parts += group.parts
        sent = iter(self._upload.send([*parts, *batch.words]))
        tokens, positions, rows, where = (next(sent) for _ in range(4))
        decode, prefill = (group.entries(sent) for group in groups)
        return FlashStep(
            inputs=ModelInputs(tokens, positions, rows, tuple(sent)),
            pool=self.pool,
            places=where.view(torch.int64),
            decode=decode,
            prefill=prefill,
            decodes=decodes,
            calls=self._calls,
        )


@dataclass(frozen=True, slots=True)
class _Group:
    """The decode or the prefill entries in host memory; ``parts`` as in ``FlashEntries``."""

    parts: tuple[NDArray[np.int32], ...]
    most_rows: int
    longest: int

    @classmethod
    def of(cls, batch: Batch, which: slice, block_size: int) -> _Group:
        spans, lengths = batch.spans[which], batch.lengths[which]
        widths = -(lengths // -block_size)
        # Shorter tables are padded with their last block: it is never read, but must be valid.
        places = np.minimum(np.arange(widths.max(initial=0)), widths[:, None] - 1)
        table = batch.blocks[places + spans[:, 3, None]]
        whole = (_offsets(spans[:, 2]), _offsets(lengths), lengths, table)
        return cls(
            tuple(part.astype(np.int32) for part in whole),
            int(spans[:, 2].max(initial=0)),
            int(lengths.max(initial=0)),
        )

    def entries(self, sent: Iterator[torch.Tensor]) -> FlashEntries | None:
        """The parts on the device; ``None`` if the batch has no such entries."""
        rows, keys, lengths, table = (next(sent) for _ in self.parts)
        if not self.most_rows:
            return None
        return FlashEntries(rows, keys, lengths, table, self.most_rows, self.longest)


def _places(slots: NDArray[np.int32], shape: PoolShape) -> NDArray[np.int64]:
    """The rows of K, then those of V, of each packed position in layer 0, for ``KVPool.store``."""
    blocks, offsets = np.divmod(slots.astype(np.int64), shape.block_size)
    heads = np.arange(shape.num_kv_heads) * shape.head_runs
    runs = blocks[:, None] * shape.block_runs + heads
    rows = (runs * shape.block_size + offsets[:, None]).reshape(-1)
    places: NDArray[np.int64] = np.concatenate((rows, rows + shape.block_size))
    return places


def _offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Cumulative counts from 0: [n + 1]."""
    offsets: NDArray[np.int64] = np.concatenate(([0], np.cumsum(counts)))
    return offsets


@dataclass(frozen=True, slots=True)
class FlashStep:
    """One step; see ``AttentionStep``."""

    inputs: ModelInputs
    pool: KVPool
    places: torch.Tensor
    decode: FlashEntries | None
    prefill: FlashEntries | None
    decodes: int
    calls: FlashCalls

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """Store K and V, then attend: one call for decode entries, one for prefill entries."""
        self._check(layer, query, key, value)
        self.pool.store(layer, self.places, key, value)
        keys, values = self.pool.by_position[:, layer].unbind(1)
        scale = query.shape[2] ** -0.5 if scaling is None else scaling
        rows = _aligned(query)
        cut = self.decodes
        made = []
        if self.decode is not None:
            made.append(self.calls.decode(rows[:cut], keys, values, self.decode, scale))
        if self.prefill is not None:
            made.append(self.calls.prefill(rows[cut:], keys, values, self.prefill, scale))
        return (made[0] if len(made) == 1 else torch.cat(made)).contiguous()

    def _check(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """``ValueError`` if a layer, shape or dtype is not the pool's: no kernel checks it."""
        shape = self.pool.shape
        kept = (self.inputs.tokens.shape[1], shape.num_kv_heads, shape.head_dim)
        fits = (
            query.shape[::2] == kept[::2]
            and query.shape[1] % kept[1] == 0
            and key.shape == value.shape == kept
            and 0 <= layer < shape.num_layers
            and query.dtype is key.dtype is value.dtype is self.pool.tensor.dtype
        )
        if not fits:
            shapes = [(tuple(one.shape), one.dtype) for one in (query, key, value)]
            raise ValueError(f"layer {layer}, {shapes}: not of this pool and {kept[0]} rows")


def _aligned(query: torch.Tensor) -> torch.Tensor:
    """Q, copied if its strides are not multiples of what the kernels load at once."""
    places = (query.stride(0), query.stride(1), int(query.storage_offset()))
    fits = query.stride(2) == 1 and not any(place % ALIGNED for place in places)
    return query if fits else query.clone(memory_format=torch.contiguous_format)
