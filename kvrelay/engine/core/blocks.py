"""The pool's bookkeeping: references, free blocks, and names.

A block without references is free. A free block keeps its name, and can be found by it, until it
is taken for other content: blocks without a name first, then the least recently freed. Several held
blocks may have one name, if requests computed equal content at once; the name finds one of them as
long as any is left.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

REMEMBERED_LOSSES = 1024


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


@dataclass(slots=True)
class LeadingRun:
    """The blocks that ``BlockPool.leading`` found for some names, each with its place.

    It is as of the pool's loss number ``losses``. The names and their limit may grow.
    """

    places: dict[int, int] = field(default_factory=dict)
    losses: int = 0


class BlockPool:
    """References, free list and names of ``size`` blocks, numbered from 0."""

    def __init__(self, size: int) -> None:
        self.references = [0] * size
        self.free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(size))
        self.names: list[bytes | None] = [None] * size
        self.by_name: dict[bytes, int] = {}
        self.copies: dict[bytes, list[int]] = {}  # further held blocks of the name
        self.losses = 0  # how often a block has lost its name
        self.lost = deque[int](maxlen=REMEMBERED_LOSSES)  # the blocks that lost it last

    def leading(self, names: Sequence[bytes], limit: int, run: LeadingRun) -> list[int]:
        """Blocks of the longest leading run of ``names[:limit]`` in the pool. Changes only ``run``.

        What ``run`` remembers of the last call is cut at its first block that has lost its name
        since, and walked from there.
        """
        places, since = run.places, self.losses - run.losses
        lost = islice(reversed(self.lost), since)
        cuts = (places[block] for block in lost if block in places)
        first = 0 if since > len(self.lost) else min(cuts, default=len(places))
        while len(places) > first:
            places.popitem()
        run.losses = self.losses
        for index in range(first, min(limit, len(names))):
            block = self.by_name.get(names[index])
            if block is None:
                break
            places[block] = index
        return list(places)

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
        """Remove a reference from each. The last block of a sequence is reused first.

        A block that becomes free loses its name if another block has the same content.
        """
        for block in reversed(blocks):
            if self.references[block] < 1:
                raise RuntimeError(f"block {block} is dropped and has no references")
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free[block] = None
                if self.names[block] in self.copies:
                    self._forget(block)
                self.free.move_to_end(block, last=self.names[block] is not None)

    def name(self, block: int, name: bytes) -> None:
        """Name the content of a held block. A free block that has the name loses it."""
        if self.names[block] == name:
            return
        self._forget(block)
        self.names[block] = name
        first = self.by_name.setdefault(name, block)
        if first != block:
            self.copies.setdefault(name, []).append(block)
            if self.references[first] == 0:
                self._forget(first)
                self.free.move_to_end(first, last=False)

    def _forget(self, block: int) -> None:
        """Take the name from a block; the next copy, if any, is found by it instead."""
        name = self.names[block]
        if name is None:
            return
        self.names[block] = None
        self.losses += 1
        self.lost.append(block)
        copies = self.copies.get(name, [])
        if self.by_name[name] != block:
            copies.remove(block)
        elif copies:
            self.by_name[name] = copies.pop(0)
        else:
            del self.by_name[name]
        if not copies:
            self.copies.pop(name, None)
