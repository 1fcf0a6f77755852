"""Copies between vLLM's pages in host memory and the memory that a store's client shares with it.

A block of a store on this host goes from the arena to its pages, and from its pages to the window,
without a buffer between them: the pages of new memory cost more than the copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

import numpy as np

from kvrelay.engine.vllm.kv.pages import HostPages
from kvstore.limits import MAX_NAMES


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """A ``CopiedBlock`` in the target that the caller gave."""

    payload: memoryview
    turn: int
    placed: bool = True


class HostCopies:
    """``DeviceCopies`` over ``HostPages``."""

    most_blocks = MAX_NAMES

    def __init__(self, pages: HostPages) -> None:
        self._pages = pages

    def loading(self) -> HostBatch:
        return HostBatch(self._pages)

    def saving(self) -> HostBatch:
        return HostBatch(self._pages)


class HostBatch:
    """A ``CopyBatch`` whose copies have ended when their call returns."""

    background = False

    def __init__(self, pages: HostPages) -> None:
        self._pages = pages
        self.turn = 0

    def __enter__(self) -> HostBatch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return

    def slot(self) -> memoryview:
        """Memory that costs nothing until it is written to."""
        return np.empty(self._pages.nbytes(self._pages.shape.block_size), np.uint8).data

    def load(self, block: int, count: int, payload: memoryview) -> bool:
        self._pages.write(block, count, payload)
        return True

    def save(self, block: int, count: int, target: memoryview | None) -> PlacedBlock | None:
        """``None`` without a target: the caller reads the block itself."""
        if target is None:
            return None
        self._pages.read_into(block, count, target)
        return PlacedBlock(target, self.turn)

    def settle(self) -> None:
        return

    def recycle(self) -> None:
        self.turn += 1
