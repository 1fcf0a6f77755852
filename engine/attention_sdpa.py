"""Paged attention by ``scaled_dot_product_attention``: runs everywhere, in every dtype.

Decode entries are gathered into a workspace that is kept (the first touch of fresh pages costs
more than the copy) and attended in groups of similar length; prefill entries one by one. KV heads
are never repeated: grouped queries are rows of one query matrix, or heads over an expanded view.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from engine.attention_index import DecodeGroup, Indices, PrefillEntry
from engine.batch import Batch
from engine.kv_pool import KVPool


class SdpaBackend:
    """SDPA over a pool in host or CUDA memory."""

    name = "sdpa"

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self._indices = Indices(pool)
        self._workspace = pool.tensor.new_empty(0)

    def step(self, batch: Batch) -> SdpaStep:
        """Index the batch: groups of decode entries, then prefill entries, each with its mask."""
        groups = tuple(self._indices.groups(batch))
        prefills = tuple(self._indices.prefills(batch))
        needed = [g.runs.shape[0] for g in groups]
        needed += [p.runs.shape[0] for p in prefills if p.runs is not None]
        return SdpaStep(self.pool, batch, groups, prefills, self._room(max(needed, default=0)))

    def _room(self, runs: int) -> torch.Tensor:
        """A workspace of at least so many runs; it only grows, by doubling."""
        shape = self.pool.shape
        width = shape.block_size * shape.num_kv_heads * shape.head_dim
        if self._workspace.numel() < runs * width:
            self._workspace = self.pool.tensor.new_empty(2 * runs * width)
        return self._workspace[: runs * width].view(runs, width)


class SdpaStep:
    """One step over the pool; see ``AttentionStep``."""

    def __init__(
        self,
        pool: KVPool,
        batch: Batch,
        groups: tuple[DecodeGroup, ...],
        prefills: tuple[PrefillEntry, ...],
        workspace: torch.Tensor,
    ) -> None:
        self._pool = pool
        self._rows = batch.rows
        self._groups = groups
        self._prefills = prefills
        self._workspace = workspace

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """Store, then attend group by group and entry by entry."""
        self._pool.store(layer, self._rows, key, value)
        if len(self._groups) == 1 and not self._prefills:  # plain decode: nothing to put together
            return self._decode(layer, self._groups[0], query, scaling)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in self._groups:
            here = slice(group.first, group.last)
            out[here] = self._decode(layer, group, query[here], scaling)
        for entry in self._prefills:
            here = slice(entry.first, entry.last)
            keys, values = key[here], value[here]
            if entry.runs is not None:
                keys, values = self._gather(layer, entry.runs, 1)[:, 0]
            out[here] = _prefill(query[here], keys, values, entry.mask, scaling)
        return out

    def _gather(self, layer: int, runs: torch.Tensor, entries: int) -> torch.Tensor:
        """The contexts of entries as [k|v, entry, position, kv head, head dim]."""
        shape = self._pool.shape
        room = self._workspace[: runs.shape[0]]
        self._pool.gather(layer, runs, room)
        return room.view(2, entries, -1, shape.num_kv_heads, shape.head_dim)

    def _decode(
        self, layer: int, group: DecodeGroup, query: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """One query position per entry [entries, heads, head dim], padded contexts."""
        entries, heads, width = query.shape
        keys, values = self._gather(layer, group.runs, entries).transpose(2, 3)
        grouped = query.reshape(entries, keys.shape[1], -1, width)
        out = sdpa(grouped, keys, values, attn_mask=group.mask, scale=scaling)
        return out.reshape(entries, heads, width)


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """One entry: Q [count, heads, head dim] over K and V [positions, kv heads, head dim].

    A kv head is an SDPA batch and its queries are that batch's heads over one expanded view.
    """
    count, heads, width = query.shape
    kv_heads = key.shape[1]
    grouped = query.transpose(0, 1).reshape(kv_heads, heads // kv_heads, count, width)
    shared = (kv_heads, heads // kv_heads, key.shape[0], width)
    keys, values = (t.transpose(0, 1)[:, None].expand(shared) for t in (key, value))
    out = sdpa(grouped, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling)
    return out.reshape(heads, count, width).transpose(0, 1)
