"""One step's works packed into one row of tokens, with every index the step needs built once.

Decode entries (one position, with context) come first, longest first; prefill entries follow.
The order inside a batch is this file's business: results are aligned with the caller's works again
through ``samples``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kv_pool import PoolShape
from engine.work import Work

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """``T`` positions of all works in packed order, ``R`` of which are followed by a sample.

    ``tokens`` and ``positions`` are [1, T]. ``rows`` [2T] is where K, then V, of each position lie
    in layer 0 of the pool (see ``KVPool.store``). ``tables`` are the block tables as far as each
    work reads them; ``opened`` are blocks that get their first position, but not all, in this step.
    ``logit_rows`` [R] are packed positions, ``samples`` the caller's indices.
    """

    decodes: tuple[Work, ...]
    prefills: tuple[Work, ...]
    tables: tuple[Ints, ...]
    opened: tuple[int, ...]
    tokens: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    logit_rows: torch.Tensor
    samples: tuple[int, ...]


def pack(works: Sequence[Work], shape: PoolShape, device: torch.device) -> Batch:
    """Lay the works out for one forward pass over a pool of the given shape."""
    order = sorted(range(len(works)), key=lambda index: _rank(works[index]))
    packed = [works[index] for index in order]
    first_prefill = sum(1 for work in packed if is_decode(work))
    tables = tuple(_table(work, shape.block_size) for work in packed)
    positions = _concatenated([np.arange(w.start, w.start + w.count) for w in packed])
    rows = _concatenated([_rows(w, t, shape) for w, t in zip(packed, tables, strict=True)])
    ends = np.cumsum([work.count for work in packed]) - 1
    sampling = [place for place, work in enumerate(packed) if work.sampling is not None]
    tokens = chain.from_iterable(w.tokens[w.start : w.start + w.count] for w in packed)
    return Batch(
        decodes=tuple(packed[:first_prefill]),
        prefills=tuple(packed[first_prefill:]),
        tables=tables,
        opened=tuple(int(t[-1]) for w, t in zip(packed, tables, strict=True) if _opens(w, shape)),
        tokens=_tensor(np.fromiter(tokens, np.int64, len(positions))[None], device),
        positions=_tensor(positions[None], device),
        rows=_tensor(np.concatenate((rows, rows + shape.block_size)), device),
        logit_rows=_tensor(ends[sampling], device),
        samples=tuple(order[place] for place in sampling),
    )


def is_decode(work: Work) -> bool:
    """One position with context before it: what the batched kernel computes."""
    return work.count == 1 and work.start > 0


def _rank(work: Work) -> tuple[bool, int]:
    return (not is_decode(work), -work.start)


def _opens(work: Work, shape: PoolShape) -> bool:
    filled = (work.start + work.count) % shape.block_size
    return 0 < filled <= work.count


def _table(work: Work, block_size: int) -> Ints:
    used = -(-(work.start + work.count) // block_size)
    if len(work.blocks) < used:
        raise ValueError(f"a table of {len(work.blocks)} blocks does not cover {used}")
    return np.fromiter(work.blocks[:used], np.int64, used)


def _rows(work: Work, table: Ints, shape: PoolShape) -> Ints:
    if work.count == 1:  # plain integers: numpy's overhead is most of a decode entry's cost
        row = int(table[-1]) * shape.block_rows + work.start % shape.block_size
        return np.array([row], np.int64)
    positions = np.arange(work.start, work.start + work.count)
    blocks, offsets = np.divmod(positions, shape.block_size)
    return table[blocks] * shape.block_rows + offsets


def _concatenated(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _tensor(array: Ints, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
