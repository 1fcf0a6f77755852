"""Copies between vLLM's pages in host memory and the memory that a store's client shares with it.

A block of a store on this host goes from the arena to its pages, and from its pages to the window,
without a buffer between them: the pages of new memory cost more than the copies. The next blocks of
a load are verified while other threads copy the first ones.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from kvrelay.engine.vllm.kv.pages import HostPages
from kvrelay.process.cores import available_cores
from kvstore.limits import MAX_NAMES

LARGE = 1 << 20
"""Bytes of a block whose copy costs more than to hand it to another thread."""

HELPERS = 3
"""Threads that copy, at most: one thread verifies about as fast as three copy."""


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """A ``CopiedBlock`` in the target that the caller gave."""

    payload: memoryview
    turn: int
    placed: bool = True


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A block whose copy to its pages waits for a helper, runs or has ended."""

    future: Future[None]
    block: int
    count: int
    payload: memoryview


class HostCopies:
    """``DeviceCopies`` over ``HostPages``."""

    most_blocks = MAX_NAMES

    def __init__(self, pages: HostPages) -> None:
        self._pages = pages
        helpers = min(available_cores() - 1, HELPERS)
        large = pages.nbytes(pages.shape.block_size) >= LARGE
        self._helpers = ThreadPoolExecutor(helpers, "page-copy") if helpers and large else None

    def loading(self) -> HostBatch:
        return HostBatch(self._pages, self._helpers)

    def saving(self) -> HostBatch:
        return HostBatch(self._pages)


class HostBatch:
    """A ``CopyBatch``; what is loaded is copied by ``helpers``, and in ``settle`` here too."""

    background = False

    def __init__(self, pages: HostPages, helpers: ThreadPoolExecutor | None = None) -> None:
        self._pages = pages
        self._helpers = helpers
        self._copies: list[PageCopy] = []
        self.turn = 0

    def __enter__(self) -> HostBatch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.settle()

    def slot(self) -> memoryview:
        """Memory that costs nothing until it is written to."""
        return np.empty(self._pages.nbytes(self._pages.shape.block_size), np.uint8).data

    def load(self, block: int, count: int, payload: memoryview) -> bool:
        if self._helpers is None:
            self._pages.write(block, count, payload)
        else:
            future = self._helpers.submit(self._pages.write, block, count, payload)
            self._copies.append(PageCopy(future, block, count, payload))
        return True

    def save(self, block: int, count: int, target: memoryview | None) -> PlacedBlock | None:
        """``None`` without a target: the caller reads the block itself."""
        if target is None:
            return None
        self._pages.read_into(block, count, target)
        return PlacedBlock(target, self.turn)

    def settle(self) -> None:
        """Copy, from the last block on, what no helper has begun."""
        copies = self._copies
        self._copies = []
        try:
            for copy in reversed(copies):
                if copy.future.cancel():
                    self._pages.write(copy.block, copy.count, copy.payload)
        finally:
            begun = [copy.future for copy in copies if not copy.future.cancelled()]
            wait(begun)
        for future in begun:
            future.result()

    def recycle(self) -> None:
        self.turn += 1
