"""The works of one step packed into one row of tokens.

Decode entries (one position, with context) come first, longest first; prefill entries follow.
``samples`` aligns the results with the caller's works again. On the CPU a row's KV and logits do
not depend, to the bit, on where a prompt is cut or on what is beside it (dense models).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.core.updates import Work


@dataclass(frozen=True, slots=True)
class Batch:
    """``T`` positions of ``n`` works in packed order, ``R`` of which are followed by a sample.

    ``tokens`` and ``positions`` are [1, T]. ``spans`` [n, 4] has of each work its first packed row,
    its first position, its number of positions, and where its block table begins in ``blocks``,
    the joined tables as far as the works read them. The first ``decodes`` works are decode
    entries. ``logit_rows`` [R] are packed rows, ``samples`` the caller's indices.
    """

    spans: NDArray[np.int64]
    blocks: NDArray[np.int32]
    decodes: int
    tokens: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    samples: tuple[int, ...]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Positions of each work and its context."""
        ends: NDArray[np.int64] = self.spans[:, 1] + self.spans[:, 2]
        return ends


def pack(works: Sequence[Work], block_size: int, device: torch.device) -> Batch:
    """Pack the works for one forward pass over a pool of such blocks."""
    order = sorted(range(len(works)), key=lambda index: _rank(works[index]))
    packed = [works[index] for index in order]
    tables = [_table(work, block_size) for work in packed]
    spans = np.empty((len(works), 4), np.int64)
    spans[:, 1] = [work.start for work in packed]
    spans[:, 2] = [work.count for work in packed]
    ends = np.cumsum(spans[:, 2])
    spans[:, 0] = ends - spans[:, 2]
    sizes = np.array([len(table) for table in tables], np.int64)
    spans[:, 3] = np.cumsum(sizes) - sizes
    tokens = chain.from_iterable(w.tokens[w.start : w.start + w.count] for w in packed)
    sampling = [place for place, work in enumerate(packed) if work.sampling is not None]
    return Batch(
        spans=spans,
        blocks=np.fromiter(chain.from_iterable(tables), np.int32, int(sizes.sum())),
        decodes=sum(map(is_decode, packed)),
        tokens=_tensor(np.fromiter(tokens, np.int64, int(ends[-1]))[None], device),
        positions=_tensor(positions_of(spans)[None], device),
        logit_rows=_tensor(ends[sampling] - 1, device),
        samples=tuple(order[place] for place in sampling),
    )


def is_decode(work: Work) -> bool:
    """Whether a work is one position with context before it."""
    return work.count == 1 and work.start > 0


def positions_of(spans: NDArray[np.int64]) -> NDArray[np.int64]:
    """The position of each packed row [T], in host memory."""
    rows, starts, counts, _ = spans.T
    total = int(counts.sum())
    if total == len(spans):  # one position of each
        alone: NDArray[np.int64] = starts.copy()
        return alone
    positions: NDArray[np.int64] = np.arange(total) + np.repeat(starts - rows, counts)
    return positions


def _rank(work: Work) -> tuple[bool, int]:
    return (not is_decode(work), -work.start)


def _table(work: Work, block_size: int) -> Sequence[int]:
    used = -(-(work.start + work.count) // block_size)
    if len(work.blocks) < used:
        raise ValueError(f"a table of {len(work.blocks)} blocks does not cover {used}")
    return work.blocks[:used]


def _tensor(array: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
