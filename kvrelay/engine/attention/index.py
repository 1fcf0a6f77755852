"""The indices of one step of paged attention by gathering: built once, used in every layer.

A run is what ``KVPool.gather`` copies: a block's positions in one layer's K or V. Rows and keys are
padded to sizes in which SDPA computes a row to the same bits whatever is computed beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.attention.batch import Batch
from kvrelay.engine.attention.pool import KVPool

WORKSPACE_BYTES = 16 << 20  # of a group of decode entries: about what stays in a cache
TILE = 256  # queries of one call: it reads no key after its last query

# Batch invariance. A recomputation, after a preemption or on another worker, is cut into chunks
# otherwise than the first time, so a row must not be rounded by how many rows or hidden keys are
# beside it. Measured on the CPU with MKL (AVX2 and AVX-512, heads of 16 to 256, one and two
# threads): a product of fewer than 4 rows is added up in another order than a larger one, and so
# is one over 193 to 383 keys. SDPA takes queries in runs of 32 or a multiple and keys in runs of
# 512, so the size of the last run matters; what a mask hides adds zero.
_QUERY_RUN = 32
_FEWEST_QUERIES = 4
_KEY_RUN = 512
_KEYS_ALIKE = 192
_KEYS_ALIKE_AGAIN = 384
_VECTOR = 16


def queries_computed(count: int) -> int:
    """The number of query rows to compute for ``count`` that are used."""
    last = count % _QUERY_RUN
    return count + _FEWEST_QUERIES - last if 0 < last < _FEWEST_QUERIES else count


def keys_computed(count: int) -> int:
    """The number of keys to compute with for ``count`` that are seen; the others are masked."""
    whole = -(-count // _VECTOR) * _VECTOR
    last = whole % _KEY_RUN
    return whole + _KEYS_ALIKE_AGAIN - last if _KEYS_ALIKE < last < _KEYS_ALIKE_AGAIN else whole


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode entries ``[first, last)``: ``runs`` [2 * entries * blocks], ``mask`` [.., keys]."""

    first: int
    last: int
    runs: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Packed rows ``[first, last)`` of one entry, and their causal mask [queries, keys]."""

    first: int
    last: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillEntry:
    """One prefill entry: the ``runs`` [2 * blocks] of its context and itself, and its tiles."""

    runs: torch.Tensor
    tiles: tuple[PrefillTile, ...]


class IndexBuilder:
    """Builds the groups and entries of batches over one pool."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def groups(self, batch: Batch) -> Iterator[DecodeGroup]:
        """Decode entries of similar length together, longest first."""
        tables = batch.tables[: len(batch.decodes)]
        limit = WORKSPACE_BYTES // (2 * self._pool.shape.block_size * self._pool.shape.row_bytes)
        first = 0
        while first < len(tables):
            width = len(tables[first])
            last = first + 1
            while last < len(tables) and (last + 1 - first) * width <= limit:
                if 2 * len(tables[last]) < width:  # more than half would be padding
                    break
                last += 1
            lengths = [work.start + 1 for work in batch.decodes[first:last]]
            mask = self._mask(lengths)
            yield DecodeGroup(first, last, self._runs(tables[first:last], mask.shape[-1]), mask)
            first = last

    def prefills(self, batch: Batch) -> Iterator[PrefillEntry]:
        """Prefill entries, each in tiles."""
        first = len(batch.decodes)
        for work, table in zip(batch.prefills, batch.tables[first:], strict=True):
            end = work.start + work.count
            tiles = tuple(
                self._tile(first, work.start, start, min(TILE, end - start))
                for start in range(work.start, end, TILE)
            )
            yield PrefillEntry(self._runs((table,), keys_computed(end)), tiles)
            first += work.count

    def _tile(self, row: int, origin: int, start: int, count: int) -> PrefillTile:
        """Positions ``[start, start + count)``; ``origin`` is that of packed row ``row``."""
        seen = np.arange(start, start + queries_computed(count))
        hidden = np.arange(keys_computed(start + count)) > seen[:, None]
        first = row + start - origin
        return PrefillTile(first, first + count, self._additive(hidden))

    def _runs(self, tables: Sequence[Sequence[int]], keys: int) -> torch.Tensor:
        """K runs, then V runs, of at least ``keys`` positions: padded with an entry's last block.

        Padding is masked, and its content belongs to the same entry: no entry can disturb another,
        not even with an infinity or a NaN.
        """
        width = -(-keys // self._pool.shape.block_size)
        padded: list[int] = []
        for table in tables:
            padded.extend(table)
            padded.extend((table[-1],) * (width - len(table)))
        runs = np.array(padded, np.int64) * (2 * self._pool.shape.num_layers)
        return torch.from_numpy(np.concatenate((runs, runs + 1))).to(self._pool.device)

    def _mask(self, lengths: list[int]) -> torch.Tensor:
        """The additive mask [entries, 1, 1, keys] of decode entries of these lengths."""
        hidden = np.arange(keys_computed(max(lengths))) >= np.array(lengths)[:, None]
        return self._additive(hidden)[:, None, None]

    def _additive(self, hidden: NDArray[np.bool_]) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._pool.tensor.dtype, device=self._pool.device)
        return mask.masked_fill_(torch.from_numpy(hidden).to(self._pool.device), -torch.inf)
