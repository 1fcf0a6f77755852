"""Launches attention and the KV store over one pool of any strides."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrelay.engine.cuda.attention_kernels import attend_decode, attend_prefill, combine_segments
from kvrelay.engine.cuda.launch import launch
from kvrelay.engine.cuda.row_kernels import store_rows

SEGMENT = 512
"""Keys that are summed before they are merged with those before: a part of every row's bits."""

REVISION = 1
"""Changes with every change to the bits of a result."""

_DECODE_ROWS = 16  # the fewest of a matrix instruction
_NARROW = 128  # columns of a head, in half precision, for which the larger tiles fit


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
        return _Tile(max(_DECODE_ROWS, power_of_two(group)), keys=16, warps=8, stages=2)
    rows = _DECODE_ROWS if not prefill else 64 if width <= _NARROW else 32
    return _Tile(rows=max(rows, power_of_two(group)), keys=32, warps=8 if prefill else 4, stages=2)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """``window`` 0 is none, ``softcap`` 0 is none; ``sinks`` [heads] are scores without values."""

    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


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

    def strides(self, layer: int) -> tuple[int, int, int, int, int]:
        """Of a block, K to V, a position and a head; and where the layer begins."""
        s_block, s_layer, s_kv, s_pos, s_head, _ = self.tensor.stride()
        return s_block, s_kv, s_pos, s_head, layer * s_layer

    def store(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write K and V [rows, kv heads, head dim] of one layer."""
        launch(
            store_rows,
            (key.shape[0], self.kv_heads),
            key,
            value,
            self.tensor,
            slots,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            *self.strides(layer),
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
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if entries.decodes:
            self._decode(layer, query, out, entries, scaling, options)
        if entries.prefill_rows:
            self._prefill(layer, query, out, entries, scaling, options)
        return out

    def _prefill(
        self,
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        entries: PagedEntries,
        scaling: float,
        options: AttentionOptions,
    ) -> None:
        group = query.shape[1] // self.kv_heads
        tile = _tile(self.width, query.dtype, group, prefill=True)
        spans = entries.spans[entries.decodes :]
        launch(
            attend_prefill,
            (entries.prefill_rows // (tile.rows // group) + spans.shape[0], self.kv_heads),
            query,
            out,
            self.tensor,
            spans,
            entries.blocks,
            out if options.sinks is None else options.sinks,
            spans.shape[0],
            entries.decodes,
            query.stride(0),
            query.stride(1),
            out.stride(0),
            out.stride(1),
            *self.strides(layer),
            scaling,
            options.window,
            options.softcap,
            warps=tile.warps,
            stages=tile.stages,
            GROUP=group,
            ROWS=tile.rows,
            KEYS=tile.keys,
            SEGMENT=SEGMENT,
            BLOCK=self.block_size,
            DIM=self.dim,
            WIDTH=self.width,
            WINDOWED=options.window > 0,
            CAPPED=options.softcap > 0,
            SINKS=options.sinks is not None,
        )

    def _decode(
        self,
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        entries: PagedEntries,
        scaling: float,
        options: AttentionOptions,
    ) -> None:
        group = query.shape[1] // self.kv_heads
        tile = _tile(self.width, query.dtype, group, prefill=False)
        segments = -(-entries.longest // SEGMENT)
        shape = (entries.decodes, self.kv_heads, segments, group)
        partial = torch.empty((*shape, self.dim), dtype=torch.float32, device=query.device)
        weights = torch.empty((*shape, 2), dtype=torch.float32, device=query.device)
        launch(
            attend_decode,
            shape[:3],
            query,
            partial,
            weights,
            self.tensor,
            entries.spans,
            entries.blocks,
            query.stride(0),
            query.stride(1),
            *self.strides(layer),
            scaling,
            options.window,
            options.softcap,
            warps=tile.warps,
            stages=tile.stages,
            GROUP=group,
            ROWS=tile.rows,
            KEYS=tile.keys,
            SEGMENT=SEGMENT,
            BLOCK=self.block_size,
            DIM=self.dim,
            WIDTH=self.width,
            WINDOWED=options.window > 0,
            CAPPED=options.softcap > 0,
        )
        self._combine(partial, weights, out, entries, tile, options)

    def _combine(
        self,
        partial: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        entries: PagedEntries,
        tile: _Tile,
        options: AttentionOptions,
    ) -> None:
        """Merge the segments of decode entries."""
        _, _, segments, group, _ = partial.shape
        launch(
            combine_segments,
            partial.shape[:2],
            partial,
            weights,
            out,
            entries.spans,
            out if options.sinks is None else options.sinks,
            segments,
            out.stride(0),
            out.stride(1),
            options.window,
            warps=4,
            GROUP=group,
            ROWS=tile.rows,
            SEGMENT=SEGMENT,
            DIM=self.dim,
            WIDTH=self.width,
            WINDOWED=options.window > 0,
            SINKS=options.sinks is not None,
        )


def power_of_two(least: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (least - 1).bit_length()
