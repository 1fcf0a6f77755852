"""Launches attention and the KV store over one pool of any strides."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrelay.engine.cuda.arguments import (
    SEGMENT,
    AttentionOptions,
    Contexts,
    LayerPool,
    Rows,
    Scoring,
    TileShape,
)
from kvrelay.engine.cuda.attention_kernels import attend_decode, attend_prefill, combine_segments
from kvrelay.engine.cuda.launch import launch
from kvrelay.engine.cuda.row_kernels import store_rows

REVISION = 2
"""Changes with every change to the bits of a result, the angles of a rotation included."""

_DECODE_ROWS = 16  # the fewest of a matrix instruction
_MIDDLE = 128  # columns of a head, in half precision, for which 64 rows fit without spilling


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows of Q and keys of a program, its warps, and the tiles that are loaded ahead.

    ``keys`` is a part of every row's bits, so it is one for prefill and decode.
    """

    rows: int
    keys: int
    warps: int
    stages: int


def _tile(width: int, dtype: torch.dtype, group: int, prefill: bool) -> _Tile:
    """As large as registers and 99 KB of shared memory hold (see the tests of resources)."""
    if dtype.itemsize == 4:  # no tensor cores: numbers are in registers
        rows = 2 * _DECODE_ROWS if prefill else _DECODE_ROWS
        return _Tile(max(rows, power_of_two(group)), keys=16, warps=8, stages=2)
    if not prefill:
        return _Tile(max(_DECODE_ROWS, power_of_two(group)), keys=32, warps=4, stages=2)
    rows = 64 if width == _MIDDLE else 32
    return _Tile(
        max(rows, power_of_two(group)), keys=32, warps=4 if width < _MIDDLE else 8, stages=2
    )


@dataclass(frozen=True, slots=True)
class PagedEntries:
    """The entries of a step on the device, all int32.

    ``spans`` [entries, 4]: first row, first position, positions, where the table begins in
    ``blocks``. The first ``decodes`` entries are of one row each (none in padding); the others have
    ``prefill_rows`` rows together, after those. ``slots`` [rows] are block * block size + offset,
    or -1. ``longest`` is the largest number of keys of a decode entry.
    """

    spans: torch.Tensor
    blocks: torch.Tensor
    slots: torch.Tensor
    decodes: int
    prefill_rows: int
    longest: int


@dataclass(frozen=True, slots=True)
class PagedPool:
    """A pool [block, layer, k|v, position, kv head, head dim] of any strides but the last, 1."""

    tensor: torch.Tensor

    def __post_init__(self) -> None:
        if self.tensor.dim() != 6 or self.tensor.stride(5) != 1:
            raise ValueError(f"no kernel for a pool of strides {self.tensor.stride()}")

    @property
    def block_size(self) -> int:
        """Positions in a block."""
        return self.tensor.shape[3]

    @property
    def kv_heads(self) -> int:
        """Heads of K and V."""
        return self.tensor.shape[4]

    @property
    def dim(self) -> int:
        """The width of a head."""
        return self.tensor.shape[5]

    @property
    def width(self) -> int:
        """The columns that a program computes for a head: a power of two, 16 at least."""
        return max(16, power_of_two(self.dim))

    def layer(self, number: int) -> LayerPool:
        """One layer, as kernels take it."""
        s_block, s_layer, s_kv, s_pos, s_head, _ = self.tensor.stride()
        return LayerPool(self.tensor, number * s_layer, s_block, s_kv, s_pos, s_head)

    def store(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write K and V [rows, kv heads, head dim] of one layer."""
        launch(
            store_rows,
            (key.shape[0], self.kv_heads),
            Rows.of(key),
            Rows.of(value),
            self.layer(layer),
            slots,
            warps=1,
            BLOCK=self.block_size,
            DIM=self.dim,
            WIDTH=self.width,
        )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        entries: PagedEntries,
        scaling: float,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attend Q [rows, heads, head dim], whose K and V are stored; contiguous as Q is."""
        call = _Call(
            self,
            self.layer(layer),
            query,
            torch.empty(query.shape, dtype=query.dtype, device=query.device),
            entries,
            Scoring(scaling, options.window, options.softcap),
            options.sinks,
        )
        if entries.decodes:
            call.decode()
        if entries.prefill_rows:
            call.prefill()
        return call.out


@dataclass(frozen=True, slots=True)
class _Call:
    """The launches of attention in one layer, and what they share."""

    pool: PagedPool
    layer: LayerPool
    query: torch.Tensor
    out: torch.Tensor
    entries: PagedEntries
    scoring: Scoring
    sinks: torch.Tensor | None

    def prefill(self) -> None:
        """The entries after those of decode."""
        entries, tile = self.entries, self._tile(prefill=True)
        spans = entries.spans[entries.decodes :]
        positions = tile.rows // self._group
        launch(
            attend_prefill,
            (entries.prefill_rows // positions + spans.shape[0], self.pool.kv_heads),
            Rows.of(self.query),
            Rows.of(self.out),
            self.layer,
            Contexts(spans, entries.blocks),
            self.out if self.sinks is None else self.sinks,
            spans.shape[0],
            entries.decodes,
            self.scoring,
            warps=tile.warps,
            stages=tile.stages,
            TILE=self._shape(tile),
        )

    def decode(self) -> None:
        """The entries of one row: segments of keys by themselves, then their sum."""
        entries, tile = self.entries, self._tile(prefill=False)
        segments = -(-entries.longest // SEGMENT)
        shape = (entries.decodes, self.pool.kv_heads, segments, self._group)
        device = self.query.device
        partial = torch.empty((*shape, self.pool.dim), dtype=torch.float32, device=device)
        weights = torch.empty((*shape, 2), dtype=torch.float32, device=device)
        launch(
            attend_decode,
            shape[:3],
            Rows.of(self.query),
            partial,
            weights,
            self.layer,
            Contexts(entries.spans, entries.blocks),
            self.scoring,
            warps=tile.warps,
            stages=tile.stages,
            TILE=self._shape(tile),
        )
        launch(
            combine_segments,
            shape[:2],
            partial,
            weights,
            Rows.of(self.out),
            entries.spans,
            self.out if self.sinks is None else self.sinks,
            segments,
            self.scoring.window,
            warps=4,
            TILE=self._shape(tile),
        )

    @property
    def _group(self) -> int:
        """Query heads of a kv head."""
        return self.query.shape[1] // self.pool.kv_heads

    def _tile(self, prefill: bool) -> _Tile:
        return _tile(self.pool.width, self.query.dtype, self._group, prefill)

    def _shape(self, tile: _Tile) -> TileShape:
        return TileShape(
            GROUP=self._group,
            ROWS=tile.rows,
            KEYS=tile.keys,
            SEGMENT=SEGMENT,
            BLOCK=self.pool.block_size,
            DIM=self.pool.dim,
            WIDTH=self.pool.width,
            WINDOWED=self.scoring.window > 0,
            CAPPED=self.scoring.softcap > 0,
            SINKS=self.sinks is not None,
        )


def power_of_two(least: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (least - 1).bit_length()
