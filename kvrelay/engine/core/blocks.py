"""The pool's bookkeeping: references, free blocks, and names.

A block without references is free. A free block keeps its name, and can be found by it, until it
is taken for other content: blocks without a name first, then the least recently freed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Naming:
    """The hash chain that names blocks: a root, and a child of (parent, tokens).

    ``spaces`` gives the chain of a tenant's namespace; its names never equal another tenant's.
    """

    root: bytes
    child: Callable[[bytes, Sequence[int]], bytes]
    spaces: Callable[[bytes], Naming] | None = None

    def of(self, space: bytes) -> Naming:
        """The chain of a tenant; this one for the empty ``space``."""
        if not space:
            return self
        if self.spaces is None:
            raise RuntimeError("this engine serves no tenants")
        return self.spaces(space)


class BlockPool:
    """References, free list and names of ``size`` blocks, numbered from 0."""

    def __init__(self, size: int) -> None:
        self.references = [0] * size
        self.free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(size))
        self.names: list[bytes | None] = [None] * size
        self.by_name: dict[bytes, int] = {}

    def leading(self, names: Sequence[bytes], limit: int) -> list[int]:
        """Blocks of the longest leading run of ``names[:limit]`` in the pool. Changes nothing."""
        blocks: list[int] = []
        for name in names[:limit]:
            block = self.by_name.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def available(self, beside: Iterable[int] = ()) -> int:
        """The number of blocks that can be taken if those ``beside`` are held first."""
        return len(self.free) - sum(block in self.free for block in beside)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to each."""
        for block in blocks:
            self.references[block] += 1
            self.free.pop(block, None)

    def take(self, count: int) -> list[int]:
        """Take ``count`` free blocks for new content, with one reference and without a name."""
        if count > len(self.free):
            raise RuntimeError(f"{count} blocks wanted, {len(self.free)} free")
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._forget(block)
            self.references[block] = 1
        return taken

    def drop(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each. The last block of a sequence is reused first."""
        for block in reversed(blocks):
            if self.references[block] < 1:
                raise RuntimeError(f"block {block} is dropped and has no references")
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free[block] = None
                self.free.move_to_end(block, last=self.names[block] is not None)

    def name(self, block: int, name: bytes) -> None:
        """Name the content of ``block``. If another block has the name already, it keeps it."""
        if name not in self.by_name:
            self._forget(block)
            self.by_name[name] = block
            self.names[block] = name

    def _forget(self, block: int) -> None:
        name, self.names[block] = self.names[block], None
        if name is not None:
            del self.by_name[name]
