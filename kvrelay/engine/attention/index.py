"""The indices of one step of paged attention by gathering: built once, used in every layer.

A run is what ``KVPool.gather`` copies: the positions of one layer's K or V of one head. Rows and
keys are padded to sizes for which the bits of a row in SDPA do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.attention.batch import Batch, positions_of
from kvrelay.engine.attention.pool import KVPool

WORKSPACE_BYTES = 16 << 20  # of a group of decode entries: about what stays in a cache
TILE = 256  # queries of one call: it reads no key after its last query

# Batch invariance. A recomputation, after a preemption or on another worker, is cut into other
# chunks than the first time, so the bits of a row must not depend on the number of other rows or of
# masked keys. Measured with MKL on CPUs with AVX2, AVX-512 and AMX, heads of 16 to 512, one and two
# threads: a product of fewer than 4 rows is summed in another order than a larger one (with AMX, of
# fewer than 16 rows in wide heads), and so is one over 193 to 511 keys. SDPA takes queries in runs
# of 32 or a multiple and keys in runs of 512, so the size of the last run matters; a masked key
# adds zero.
QUERY_RUN = 32
_FEWEST_QUERIES = 16
_KEY_RUN = 512
_KEYS_ALIKE = 192
_VECTOR = 16
_FEWEST_ROWS = 4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 2


def rows_computed(rows: int) -> int:
    """The number of rows of a packed product to compute for ``rows`` that are used.

    In oneDNN a lone row has other bits. With AVX-512 four rows take less time than two: oneDNN 3.12
    reads a weight at 33 GB/s instead of 23. Measured with and without bfloat16, one to eight
    threads.
    """
    return max(rows, _FEWEST_ROWS) if rows else 0


def queries_computed(count: int) -> int:
    """The number of query rows to compute for ``count`` that are used."""
    last = count % QUERY_RUN
    return count + _FEWEST_QUERIES - last if 0 < last < _FEWEST_QUERIES else count


def keys_computed(count: int) -> int:
    """The number of keys to compute with for ``count`` that are seen; the others are masked."""
    whole = -(-count // _VECTOR) * _VECTOR
    last = whole % _KEY_RUN
    return whole + _KEY_RUN - last if last > _KEYS_ALIKE else whole


@dataclass(frozen=True, slots=True)
class GatheredRuns:
    """K runs, then V runs, by entry, head and block: [2 * entries * kv heads * blocks].

    ``padding`` are the places in ``runs`` that belong to no block of their entry; ``None``: none.
    """

    runs: torch.Tensor
    padding: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode entries ``[first, last)``; ``mask`` [.., keys]."""

    first: int
    last: int
    context: GatheredRuns
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Packed rows ``[first, last)`` of one entry, and their causal mask [queries, keys]."""

    first: int
    last: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillEntry:
    """One prefill entry: packed rows ``[first, last)``, whose positions begin with ``origin``.

    ``context`` has its own positions too.
    """

    first: int
    last: int
    origin: int
    context: GatheredRuns
    tiles: tuple[PrefillTile, ...]


class IndexBuilder:
    """Builds the groups and entries of batches over one pool."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        shape = pool.shape
        self._heads = np.arange(shape.num_kv_heads) * shape.head_runs  # the first run of each

    def rows(self, batch: Batch) -> torch.Tensor:
        """Where K, then V, of each packed position lies in layer 0: [2 * T * kv heads]."""
        shape, firsts = self._pool.shape, batch.spans[:, 3]
        blocks, offsets = np.divmod(positions_of(batch.spans), shape.block_size)
        blocks += np.repeat(firsts, batch.spans[:, 2])
        runs = batch.blocks[blocks].astype(np.int64)[:, None] * shape.block_runs + self._heads
        rows = (runs * shape.block_size + offsets[:, None]).reshape(-1)
        return self._tensor(np.concatenate((rows, rows + shape.block_size)))

    def opened(self, batch: Batch) -> list[int]:
        """Blocks that get their first position, but not all, in this step."""
        ends, size = batch.lengths, self._pool.shape.block_size
        filled = ends % size
        last = batch.blocks[batch.spans[:, 3] + (ends - 1) // size]
        found: list[int] = last[(filled > 0) & (filled <= batch.spans[:, 2])].tolist()
        return found

    def groups(self, batch: Batch) -> Iterator[DecodeGroup]:
        """Decode entries of similar length together, longest first."""
        size = self._pool.shape.block_size
        limit = WORKSPACE_BYTES // (2 * size * self._pool.shape.row_bytes)
        lengths = batch.lengths[: batch.decodes]
        widths = -(lengths // -size)
        first = 0
        while first < batch.decodes:
            width = int(widths[first])
            many = max(limit // width, 1)
            # No entry of a group is half as wide as the first: more than half would be padding.
            alike = int(np.count_nonzero(2 * widths[first : first + many] >= width))
            last = first + alike
            mask = self._mask(lengths[first:last])
            yield DecodeGroup(first, last, self._runs(batch, first, last, mask.shape[-1]), mask)
            first = last

    def prefills(self, batch: Batch) -> Iterator[PrefillEntry]:
        """Prefill entries, each in tiles."""
        for place in range(batch.decodes, len(batch.spans)):
            row, origin, count, _ = batch.spans[place].tolist()
            end = origin + count
            tiles = tuple(
                self._tile(row, origin, start, min(TILE, end - start))
                for start in range(origin, end, TILE)
            )
            runs = self._runs(batch, place, place + 1, keys_computed(end))
            yield PrefillEntry(row, row + count, origin, runs, tiles)

    def _tile(self, row: int, origin: int, start: int, count: int) -> PrefillTile:
        """Positions ``[start, start + count)``; ``origin`` is that of packed row ``row``."""
        seen = np.arange(start, start + queries_computed(count))
        hidden = np.arange(keys_computed(start + count)) > seen[:, None]
        first = row + start - origin
        return PrefillTile(first, first + count, self._additive(hidden))

    def _runs(self, batch: Batch, first: int, last: int, keys: int) -> GatheredRuns:
        """The runs of at least ``keys`` positions of each entry, padded with its last block."""
        shape = self._pool.shape
        ends = (batch.lengths[first:last, None] - 1) // shape.block_size
        places = np.arange(-(keys // -shape.block_size))
        blocks = batch.blocks[np.minimum(places, ends) + batch.spans[first:last, 3, None]]
        firsts = blocks.astype(np.int64)[:, None] * shape.block_runs + self._heads[:, None]
        runs = self._tensor(np.concatenate((firsts.reshape(-1), firsts.reshape(-1) + 1)))
        if ends.min() == places[-1]:
            return GatheredRuns(runs, None)
        beyond = np.broadcast_to((places > ends)[:, None], (2, *firsts.shape))
        return GatheredRuns(runs, self._tensor(np.flatnonzero(beyond)))

    def _mask(self, lengths: NDArray[np.int64]) -> torch.Tensor:
        """The additive mask [entries, 1, 1, keys] of decode entries of these lengths."""
        hidden = np.arange(keys_computed(int(lengths.max()))) >= lengths[:, None]
        return self._additive(hidden)[:, None, None]

    def _additive(self, hidden: NDArray[np.bool_]) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._pool.tensor.dtype, device=self._pool.device)
        return mask.masked_fill_(torch.from_numpy(hidden).to(self._pool.device), -torch.inf)

    def _tensor(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._pool.device, non_blocking=True)
