"""Paged attention by ``scaled_dot_product_attention``: runs everywhere, in every dtype.

Decode entries are gathered into a workspace that is kept (the first touch of fresh pages costs
more than the copy) and attended in groups of similar length; prefill entries one by one. KV heads
are never repeated: grouped queries are rows of one query matrix, or heads over an expanded view.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from engine.batch import Batch
from engine.kv_pool import KVPool

WORKSPACE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Group:
    """Decode entries ``[first, last)``: their ``runs`` [2 * entries * blocks] and float mask."""

    first: int
    last: int
    runs: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One prefill entry at packed rows ``[first, last)``; without ``runs`` it has no context."""

    first: int
    last: int
    runs: torch.Tensor | None
    mask: torch.Tensor | None


class SdpaBackend:
    """SDPA over a pool in host or CUDA memory."""

    name = "sdpa"

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self._workspace = pool.tensor.new_empty(0)

    def step(self, batch: Batch) -> SdpaStep:
        """Index the batch: groups of decode entries, then prefill entries, each with its mask."""
        groups = tuple(self._groups(batch))
        prefills = tuple(self._prefills(batch))
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

    def _groups(self, batch: Batch) -> Iterator[_Group]:
        tables = batch.tables[: len(batch.decodes)]
        limit = WORKSPACE_BYTES // (2 * self.pool.shape.block_size * self.pool.shape.row_bytes)
        first = 0
        while first < len(tables):
            width = len(tables[first])
            last = first + 1
            while last < len(tables) and (last + 1 - first) * width <= limit:
                if 2 * len(tables[last]) < width:  # more than half of it would be padding
                    break
                last += 1
            lengths = [work.start + 1 for work in batch.decodes[first:last]]
            yield _Group(first, last, self._runs(tables[first:last]), self._mask(lengths, width))
            first = last

    def _prefills(self, batch: Batch) -> Iterator[_Prefill]:
        first = len(batch.decodes)
        for work, table in zip(batch.prefills, batch.tables[first:], strict=True):
            last = first + work.count
            if work.start == 0:
                yield _Prefill(first, last, None, None)
            else:
                mask = self._causal(work.start, work.count, len(table))
                yield _Prefill(first, last, self._runs((table,)), mask)
            first = last

    def _runs(self, tables: Sequence[Sequence[int]]) -> torch.Tensor:
        """K runs, then V runs, padded with the entry's own last block.

        Padding is masked, and what it holds belongs to the same entry: no entry can disturb
        another, not even with an infinity or a NaN.
        """
        width = max(map(len, tables))
        padded: list[int] = []
        for table in tables:
            padded.extend(table)
            padded.extend((table[-1],) * (width - len(table)))
        runs = np.array(padded, np.int64) * (2 * self.pool.shape.num_layers)
        return torch.from_numpy(np.concatenate((runs, runs + 1))).to(self.pool.device)

    def _mask(self, lengths: list[int], width: int) -> torch.Tensor | None:
        """Additive [entries, 1, 1, width * block size], or ``None`` where nothing is padding."""
        size = width * self.pool.shape.block_size
        if min(lengths) == size:
            return None
        hidden = np.arange(size) >= np.array(lengths)[:, None]
        return self._additive(hidden)[:, None, None]

    def _causal(self, start: int, count: int, width: int) -> torch.Tensor:
        """Additive [count, width * block size]: position ``start + i`` sees ``[0, start + i]``."""
        keys = np.arange(width * self.pool.shape.block_size)
        return self._additive(keys > np.arange(start, start + count)[:, None])

    def _additive(self, hidden: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self.pool.tensor.dtype, device=self.pool.device)
        return mask.masked_fill_(torch.from_numpy(hidden).to(self.pool.device), -torch.inf)


class SdpaStep:
    """One step over the pool; see ``AttentionStep``."""

    def __init__(
        self,
        pool: KVPool,
        batch: Batch,
        groups: tuple[_Group, ...],
        prefills: tuple[_Prefill, ...],
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
        self, layer: int, group: _Group, query: torch.Tensor, scaling: float | None
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
