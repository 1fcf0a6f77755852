"""The pool's bookkeeping: who holds which block, which are free, which can be found by name.

A block is free when nobody holds it. A free block keeps its name, and can be found by it, until
it is taken for something else: least recently freed first, nameless ones before all others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """References, free list and names of ``size`` blocks, numbered from 0."""

    def __init__(self, size: int) -> None:
        self.references = [0] * size
        self.free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(size))
        self.names: list[bytes | None] = [None] * size
        self.by_name: dict[bytes, int] = {}

    def leading(self, names: Sequence[bytes], limit: int) -> list[int]:
        """Blocks of the longest leading run of ``names[:limit]`` that is here. Changes nothing."""
        found: list[int] = []
        for name in names[:limit]:
            block = self.by_name.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def available(self, beside: Iterable[int] = ()) -> int:
        """How many blocks can be taken if those ``beside`` are held first."""
        return len(self.free) - sum(block in self.free for block in beside)

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each."""
        for block in blocks:
            self.references[block] += 1
            self.free.pop(block, None)

    def take(self, count: int) -> list[int]:
        """``count`` free blocks for new content, held once; their old names are forgotten."""
        if count > len(self.free):
            raise RuntimeError(f"{count} blocks wanted, {len(self.free)} free")
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._forget(block)
            self.references[block] = 1
        return taken

    def drop(self, blocks: Sequence[int]) -> None:
        """One holder less for each. The last of a sequence becomes reusable first."""
        for block in reversed(blocks):
            if self.references[block] < 1:
                raise RuntimeError(f"block {block} is dropped and nobody holds it")
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free[block] = None
                self.free.move_to_end(block, last=self.names[block] is not None)

    def name(self, block: int, name: bytes) -> None:
        """What ``block`` holds is now what ``name`` says. The first block of a name keeps it."""
        if name not in self.by_name:
            self._forget(block)
            self.by_name[name] = block
            self.names[block] = name

    def _forget(self, block: int) -> None:
        name, self.names[block] = self.names[block], None
        if name is not None:
            del self.by_name[name]
