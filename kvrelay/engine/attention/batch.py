"""The works of one step packed into one row of tokens.

Decode entries (one position, with context) come first, longest first; prefill entries follow.
``samples`` aligns the results with the caller's works again. On the CPU the bits of a row's KV and
logits do not depend on where a prompt is cut or on the other rows (dense models).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.core.updates import Work


@dataclass(frozen=True, slots=True)
class Batch:
    """``T`` positions of ``n`` works in packed order, ``R`` of which are followed by a sample.

    All of it is in host memory. ``spans`` [n, 4] has of each work its first packed row, its first
    position, its number of positions, and where its block table begins in ``blocks``, the joined
    tables as far as the works read them. The first ``decodes`` works are decode entries. ``tokens``
    and ``positions`` are [T]. ``logit_rows`` [R] are packed rows in ascending order, ``samples``
    the caller's indices. ``words`` are further numbers that a device needs after the forward pass.
    """

    spans: NDArray[np.int64]
    blocks: NDArray[np.int32]
    decodes: int
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    logit_rows: NDArray[np.int64]
    samples: tuple[int, ...]
    words: tuple[NDArray[np.int32], ...] = ()

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Positions of each work and its context."""
        ends: NDArray[np.int64] = self.spans[:, 1] + self.spans[:, 2]
        return ends

    def padded(self, rows: int) -> Batch:
        """The same, padded to ``rows`` packed rows with decode entries that have no positions.

        For batches of decode entries that all sample.
        """
        missing = rows - len(self.tokens)
        spans = np.zeros((rows, 4), np.int64)
        spans[:, 0] = np.arange(rows)
        spans[: len(self.spans)] = self.spans
        return replace(
            self,
            spans=spans,
            decodes=rows,
            tokens=np.pad(self.tokens, (0, missing)),
            positions=np.pad(self.positions, (0, missing)),
            logit_rows=np.arange(rows),
        )

    def inputs(self, device: torch.device) -> ModelInputs:
        """What a forward pass reads, on a device; on the CPU without a copy."""
        return ModelInputs(
            tokens=_on(self.tokens[None], device),
            positions=_on(self.positions[None], device),
            rows=_on(self.logit_rows, device),
        )


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """``tokens`` and ``positions`` [1, T], the ``rows`` [R] that get logits: int64 or int32.

    ``words`` are those of the batch, in its order.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    words: tuple[torch.Tensor, ...] = ()


def no_works() -> Batch:
    """A batch without entries, to be padded."""
    none = np.zeros(0, np.int64)
    return Batch(np.zeros((0, 4), np.int64), np.zeros(1, np.int32), 0, none, none, none, ())


def pack(works: Sequence[Work], block_size: int) -> Batch:
    """Pack the works of one step, none of which was foreseen."""
    return Packer(block_size).pack(works)


class Packer:
    """Packs the works of step after step over a pool of blocks of one size.

    The block tables of works that are foreseen are made before their step.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._foreseen: dict[int, tuple[Work, NDArray[np.int32]]] = {}  # by the work's identity

    def foresee(self, works: Sequence[Work]) -> None:
        """Expect works, whose blocks do not change before the next step."""
        self._foreseen = {id(work): (work, np.array(self._table(work), np.int32)) for work in works}

    def pack(self, works: Sequence[Work]) -> Batch:
        """Pack the works for one forward pass."""
        order = sorted(range(len(works)), key=lambda index: _rank(works[index]))
        packed = [works[index] for index in order]
        tables = [self._made(work) for work in packed]
        spans, samples, logit_rows = [], [], []
        rows = offset = 0
        for index, work, table in zip(order, packed, tables, strict=True):
            spans.append((rows, work.start, work.count, offset))
            rows, offset = rows + work.count, offset + table.size
            if work.sampling is not None:
                samples.append(index)
                logit_rows.append(rows - 1)
        joined = np.array(spans, np.int64)
        tokens = chain.from_iterable(w.tokens[w.start : w.start + w.count] for w in packed)
        return Batch(
            spans=joined,
            blocks=np.concatenate(tables),
            decodes=sum(map(is_decode, packed)),
            tokens=np.fromiter(tokens, np.int64, rows),
            positions=positions_of(joined),
            logit_rows=np.array(logit_rows, np.int64),
            samples=tuple(samples),
        )

    def _made(self, work: Work) -> NDArray[np.int32]:
        known = self._foreseen.get(id(work))
        return np.array(self._table(work), np.int32) if known is None else known[1]

    def _table(self, work: Work) -> Sequence[int]:
        """The blocks that the work reads."""
        used = -(-(work.start + work.count) // self._block_size)
        if len(work.blocks) < used:
            raise ValueError(f"a table of {len(work.blocks)} blocks does not cover {used}")
        return work.blocks[:used]


def _on(array: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    here = torch.from_numpy(array)
    return here if device.type == "cpu" else here.to(device, non_blocking=True)


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
