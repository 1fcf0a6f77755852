"""Paged attention by ``scaled_dot_product_attention``: runs everywhere, in every dtype.

Contexts are gathered into a workspace that is kept (the first touch of fresh pages costs more than
the copy). Decode entries are attended in groups of similar length, prefill entries in tiles. KV
heads are never repeated: grouped queries are rows of one query matrix, or heads over an expanded
view. The sizes are those of ``attention.index``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvrelay.engine.attention.batch import Batch, ModelInputs
from kvrelay.engine.attention.index import (
    QUERY_RUN,
    DecodeGroup,
    GatheredRuns,
    IndexBuilder,
    PrefillEntry,
    PrefillTile,
    queries_computed,
)
from kvrelay.engine.attention.pool import KVPool

NARROW = 16  # narrower heads are padded to it: one vector of float32
LARGE = 2.0**58  # of K and V: a score of 1,024 products of such numbers is finite in float32


class SdpaBackend:
    """SDPA over a pool in host or CUDA memory."""

    name = "sdpa"
    profile = "sdpa-5"  # with the revision of the forward pass; torch is in the numeric profile

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self._indices = IndexBuilder(pool)
        self._workspace = pool.tensor.new_empty(0)

    def step(self, batch: Batch) -> SdpaStep:
        """Index the batch: groups of decode entries, then prefill entries, each with its mask.

        Zeroes the blocks that the batch opens, because masked positions are read.
        """
        self.pool.clear(self._indices.opened(batch))
        groups = tuple(self._indices.groups(batch))
        prefills = tuple(self._indices.prefills(batch))
        contexts = [group.context for group in groups] + [entry.context for entry in prefills]
        needed = max(len(each.runs) for each in contexts)
        rows = self._indices.rows(batch)
        inputs = batch.inputs(self.pool.device)
        return SdpaStep(inputs, self.pool, rows, groups, prefills, self._room(needed))

    def _room(self, runs: int) -> torch.Tensor:
        """A workspace of at least ``runs`` runs; it only grows, by doubling."""
        shape = self.pool.shape
        width = shape.block_size * shape.head_dim
        if self._workspace.numel() < runs * width:
            self._workspace = self.pool.tensor.new_empty(2 * runs * width)
        return self._workspace[: runs * width].view(runs, width)


@dataclass(frozen=True, slots=True)
class SdpaStep:
    """One step over the pool; see ``AttentionStep``."""

    inputs: ModelInputs
    pool: KVPool
    rows: torch.Tensor
    groups: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillEntry, ...]
    workspace: torch.Tensor

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """Store, then attend group by group and entry by entry."""
        self.pool.store(layer, self.rows, key, value)
        if len(self.groups) == 1 and not self.prefills:  # nothing to assemble
            return self._decode(layer, self.groups[0], query, scaling)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in self.groups:
            here = slice(group.first, group.last)
            out[here] = self._decode(layer, group, query[here], scaling)
        for entry in self.prefills:
            self._prefill(layer, entry, query, (key, value), scaling, out)
        return out

    def _prefill(
        self,
        layer: int,
        entry: PrefillEntry,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        scaling: float | None,
        out: torch.Tensor,
    ) -> None:
        """Attend tile by tile.

        -inf in a mask hides no NaN, and a masked score that overflows is one. So the rows before
        each of ``_wild_rows`` are computed again, with it and all that follow zeroed.
        """
        context = self._gather(layer, entry.context, 1)[:, 0]
        keys, values = context
        for tile in entry.tiles:
            out[tile.first : tile.last] = _attend_tile(tile, query, keys, values, scaling)
        wild = _wild_rows(*(each[entry.first : entry.last] for each in new))
        zeroed = context.shape[2]
        for start, stop in reversed(list(pairwise((0, *wild)))):
            context[:, :, entry.origin + stop : zeroed] = 0
            zeroed = entry.origin + stop
            for tile in entry.tiles:
                first = max(tile.first, entry.first + start)
                last = min(tile.last, entry.first + stop)
                if first < last:
                    part = _part(tile, first, last)
                    out[first:last] = _attend_tile(part, query, keys, values, scaling)

    def _gather(self, layer: int, context: GatheredRuns, entries: int) -> torch.Tensor:
        """The contexts of entries as [k|v, entry, kv head, position, head dim].

        Padding is zero: it is masked, but an infinity or a NaN would reach the result.
        """
        shape = self.pool.shape
        room = self.workspace[: context.runs.shape[0]]
        self.pool.gather(layer, context.runs, room)
        if context.padding is not None:
            room.index_fill_(0, context.padding, 0)
        return room.view(2, entries, shape.num_kv_heads, -1, shape.head_dim)

    def _decode(
        self, layer: int, group: DecodeGroup, query: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """One query position per entry [entries, heads, head dim], padded contexts."""
        entries, heads, width = query.shape
        keys, values = self._gather(layer, group.context, entries)[..., : group.mask.shape[-1], :]
        grouped = query.reshape(entries, keys.shape[1], -1, width)
        rows = grouped.shape[2]
        out = attend(_rows(grouped), keys, values, group.mask, scaling)
        return out[:, :, :rows].reshape(entries, heads, width).contiguous()


def _wild_rows(key: torch.Tensor, value: torch.Tensor) -> list[int]:
    """The rows of K and V [rows, kv heads, head dim] whose masked score may be no number.

    None after the first whose key is NaN in every head, or whose value is nothing else: from there
    on every result is NaN.
    """
    extremes = torch.stack([one for each in (key, value) for one in each.aminmax()])
    if bool((extremes.float().abs() <= LARGE).all()):
        return []
    tame = [(each.float().abs() <= LARGE).flatten(1).all(1) for each in (key, value)]
    wild: list[int] = (~(tame[0] & tame[1])).nonzero()[:, 0].tolist()
    lost = key.isnan().any(2).all(1) | value.isnan().flatten(1).all(1)
    end = int(lost.int().argmax()) if bool(lost.any()) else len(key)
    return [row for row in wild if row <= end]


def _part(tile: PrefillTile, first: int, last: int) -> PrefillTile:
    """Packed rows ``[first, last)`` of a tile."""
    rows = torch.arange(queries_computed(last - first), device=tile.mask.device)
    rows = (rows + first - tile.first).clamp_(max=len(tile.mask) - 1)
    return PrefillTile(first, last, tile.mask[rows])


def _attend_tile(
    tile: PrefillTile,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """One tile of Q [T, heads, head dim] over its entry's K and V [kv heads, positions, head dim].

    A kv head is an SDPA batch and its queries are that batch's heads over one expanded view.
    """
    rows, count = query[tile.first : tile.last].transpose(0, 1), tile.last - tile.first
    kv_heads, _, width = key.shape
    grouped = rows.reshape(kv_heads, -1, count, width)
    shared = (kv_heads, grouped.shape[1], tile.mask.shape[-1], width)
    keys, values = (t[:, None, : shared[2]].expand(shared) for t in (key, value))
    out = attend(_rows(grouped), keys, values, tile.mask, scaling)
    return out[:, :, :count].reshape(rows.shape).transpose(0, 1)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """SDPA of [entries, heads, queries or keys, head dim].

    One run of queries of one head is computed twice: alone it is no parallel region of OpenMP, so
    MKL would divide its sums among the threads (seen in bfloat16 and float16 on AVX2). Narrow heads
    are padded: MKL sums fewer than 12 numbers in an order that depends on the other rows.
    """
    width = query.shape[3]
    if width < NARROW:
        scaling = width**-0.5 if scaling is None else scaling
        query, keys, values = (pad(t, (0, NARROW - width)) for t in (query, keys, values))
    alone = query.shape[0] * query.shape[1] == 1 and query.shape[2] <= QUERY_RUN
    if alone:
        query, keys, values = (t.expand(2, -1, -1, -1) for t in (query, keys, values))
    out = sdpa(query, keys, values, attn_mask=mask, scale=scaling)
    out = out[..., :width]
    return out[:1] if alone else out


def _rows(query: torch.Tensor) -> torch.Tensor:
    """[.., queries, head dim], padded to the number of queries to compute."""
    count = query.shape[-2]
    missing = queries_computed(count) - count
    return pad(query, (0, 0, 0, missing)) if missing else query
