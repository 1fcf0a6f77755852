"""The indices of one step of paged attention by gathering: built once, used in every layer.

Runs are what ``KVPool.gather`` copies: a block's positions in one layer's K or V.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Batch
from engine.kv_pool import KVPool

WORKSPACE_BYTES = 16 << 20  # of a group of decode entries: about what stays in a cache


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode entries ``[first, last)``: their ``runs`` [2 * entries * blocks] and float mask."""

    first: int
    last: int
    runs: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillEntry:
    """One prefill entry at packed rows ``[first, last)``; without ``runs`` it has no context."""

    first: int
    last: int
    runs: torch.Tensor | None
    mask: torch.Tensor | None


class Indices:
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
                if 2 * len(tables[last]) < width:  # more than half of it would be padding
                    break
                last += 1
            lengths = [work.start + 1 for work in batch.decodes[first:last]]
            yield DecodeGroup(
                first, last, self._runs(tables[first:last]), self._mask(lengths, width)
            )
            first = last

    def prefills(self, batch: Batch) -> Iterator[PrefillEntry]:
        """Prefill entries, each with its causal mask where it has context."""
        first = len(batch.decodes)
        for work, table in zip(batch.prefills, batch.tables[first:], strict=True):
            last = first + work.count
            if work.start == 0:
                yield PrefillEntry(first, last, None, None)
            else:
                mask = self._causal(work.start, work.count, len(table))
                yield PrefillEntry(first, last, self._runs((table,)), mask)
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
        runs = np.array(padded, np.int64) * (2 * self._pool.shape.num_layers)
        return torch.from_numpy(np.concatenate((runs, runs + 1))).to(self._pool.device)

    def _mask(self, lengths: list[int], width: int) -> torch.Tensor | None:
        """Additive [entries, 1, 1, width * block size], or ``None`` where nothing is padding."""
        size = width * self._pool.shape.block_size
        if min(lengths) == size:
            return None
        hidden = np.arange(size) >= np.array(lengths)[:, None]
        return self._additive(hidden)[:, None, None]

    def _causal(self, start: int, count: int, width: int) -> torch.Tensor:
        """Additive [count, width * block size]: position ``start + i`` sees ``[0, start + i]``."""
        keys = np.arange(width * self._pool.shape.block_size)
        return self._additive(keys > np.arange(start, start + count)[:, None])

    def _additive(self, hidden: NDArray[np.bool_]) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._pool.tensor.dtype, device=self._pool.device)
        return mask.masked_fill_(torch.from_numpy(hidden).to(self._pool.device), -torch.inf)
