"""The works of one step packed into one row of tokens, with every index built once.

Decode entries (one position, with context) come first, longest first; prefill entries follow.
``samples`` aligns the results with the caller's works again. On the CPU a row's KV and logits do
not depend, to the bit, on where a prompt is cut or on what is beside it (dense models; see
``attention.index``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.attention.pool import PoolShape
from kvrelay.engine.core.updates import Work

_Ints = NDArray[np.int64]
_Numbers = Sequence[int] | _Ints


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
    tables: tuple[Sequence[int], ...]
    opened: tuple[int, ...]
    tokens: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    logit_rows: torch.Tensor
    samples: tuple[int, ...]


def pack(works: Sequence[Work], shape: PoolShape, device: torch.device) -> Batch:
    """Pack the works for one forward pass over a pool of this shape."""
    order = sorted(range(len(works)), key=lambda index: _rank(works[index]))
    packed = [works[index] for index in order]
    first_prefill = sum(map(is_decode, packed))
    tables = tuple(_table(work, shape.block_size) for work in packed)
    tokens = chain.from_iterable(w.tokens[w.start : w.start + w.count] for w in packed)
    positions = _joined([_positions(work) for work in packed])
    rows = _joined([_rows(w, t, shape) for w, t in zip(packed, tables, strict=True)])
    ends = accumulate(work.count for work in packed)
    sampling = [
        (o, e) for o, e, w in zip(order, ends, packed, strict=True) if w.sampling is not None
    ]
    return Batch(
        decodes=tuple(packed[:first_prefill]),
        prefills=tuple(packed[first_prefill:]),
        tables=tables,
        opened=tuple(t[-1] for w, t in zip(packed, tables, strict=True) if _opens(w, shape)),
        tokens=_tensor(np.fromiter(tokens, np.int64, len(positions))[None], device),
        positions=_tensor(positions[None], device),
        rows=_tensor(np.concatenate((rows, rows + shape.block_size)), device),
        logit_rows=_tensor(np.array([end - 1 for _, end in sampling], np.int64), device),
        samples=tuple(index for index, _ in sampling),
    )


def is_decode(work: Work) -> bool:
    """Whether a work is one position with context before it."""
    return work.count == 1 and work.start > 0


def _rank(work: Work) -> tuple[bool, int]:
    return (not is_decode(work), -work.start)


def _opens(work: Work, shape: PoolShape) -> bool:
    filled = (work.start + work.count) % shape.block_size
    return 0 < filled <= work.count


def _table(work: Work, block_size: int) -> Sequence[int]:
    used = -(-(work.start + work.count) // block_size)
    if len(work.blocks) < used:
        raise ValueError(f"a table of {len(work.blocks)} blocks does not cover {used}")
    return work.blocks[:used]


def _positions(work: Work) -> _Numbers:
    return [work.start] if work.count == 1 else np.arange(work.start, work.start + work.count)


def _rows(work: Work, table: Sequence[int], shape: PoolShape) -> _Numbers:
    if work.count == 1:  # plain integers: numpy's overhead would be most of a decode entry's cost
        return [table[-1] * shape.block_rows + work.start % shape.block_size]
    positions = np.arange(work.start, work.start + work.count)
    blocks, offsets = np.divmod(positions, shape.block_size)
    return np.array(table, np.int64)[blocks] * shape.block_rows + offsets


def _joined(parts: Sequence[_Numbers]) -> _Ints:
    if all(len(part) == 1 for part in parts):
        return np.array([part[0] for part in parts], np.int64)
    return np.concatenate(parts, dtype=np.int64)


def _tensor(array: _Ints, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
