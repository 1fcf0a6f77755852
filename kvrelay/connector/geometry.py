"""Which blocks a request may find outside, and what exactly each of them must be. Pure.

With ``L`` tokens and blocks of ``B``: the full blocks by the names the engine gave, and after them
the partial block of the last ``L % B`` tokens (saved by a twin of this request) or of the last
``(L - 1) % B`` before the final position (saved by the prefill leg, when ``L = P + 1``).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol

from kvrelay.block import ExpectedBlock, Namer, Namespace
from kvrelay.engine.core.external import BlockContent
from kvstore import Tail
from kvstore.limits import MAX_NAMES


class PayloadShape(Protocol):
    """What is asked of a pool's shape."""

    @property
    def num_layers(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True, slots=True)
class LookupKeys:
    """Names of the full blocks, then alternatives; ``counts`` are the tails' tokens.

    ``openings`` are those of the first block, full and partial, as far as it is asked for.
    """

    names: tuple[bytes, ...]
    tails: tuple[Tail, ...]
    counts: tuple[int, ...]
    openings: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """One block of a load: where it goes, and what has to be in it. It begins at ``start``.

    ``source`` is the one of several stores it was found in.
    """

    block: int
    start: int
    wanted: ExpectedBlock
    source: str | None = None

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + len(self.wanted.tokens)


class Geometry:
    """Blocks of one namespace in one pool's shape."""

    def __init__(self, namer: Namer, namespace: Namespace, shape: PayloadShape) -> None:
        self.namespace = namespace.digest
        self.dtype = shape.dtype
        self.block_size = shape.block_size
        self._namer = namer
        self._pool = shape

    def of(self, space: bytes) -> Geometry:
        """Blocks of a tenant's namespace, by its digest; these for the empty ``space``."""
        if not space:
            return self
        made = copy(self)
        made.namespace = space
        made._namer = self._namer.within(space)
        return made

    def shape(self, count: int) -> tuple[int, ...]:
        """The payload's: ``[layer, k|v, position, kv head, head dim]``."""
        return (self._pool.num_layers, 2, count, self._pool.num_kv_heads, self._pool.head_dim)

    def question(self, tokens: Sequence[int], names: Sequence[bytes]) -> LookupKeys:
        """What to ask the store for a request of ``tokens`` with full blocks ``names``."""
        size = self.block_size
        after = (len(tokens) - 1) // size
        start = after * size
        rests = dict.fromkeys((len(tokens) % size, (len(tokens) - 1) % size))
        counts = tuple(rest for rest in rests if rest)
        parent = names[after - 1] if after else self._namer.root
        tails = tuple(
            Tail(after, self._namer.child(parent, tokens[start : start + n])) for n in counts
        )
        firsts = [size] * bool(names) + [n for n in counts if not after]
        openings = tuple(self._namer.opening(tokens[:n]) for n in firsts)
        if len(names) > MAX_NAMES:  # blocks of one token and a very long prompt
            return LookupKeys(tuple(names[:MAX_NAMES]), (), (), openings)
        return LookupKeys(tuple(names), tails, counts, openings)

    def opening(self, piece: BlockContent) -> int | None:
        """That of a piece that begins a sequence."""
        return self._namer.opening(piece.tokens) if piece.parent == self._namer.root else None

    def part(
        self,
        tokens: Sequence[int],
        names: Sequence[bytes],
        index: int,
        count: int,
        block: int,
        source: str | None = None,
    ) -> LoadTarget:
        """The ``index``-th block of a request, of ``count`` positions, to lie in ``block``."""
        start = index * self.block_size
        held = tuple(tokens[start : start + count])
        parent = names[index - 1] if index else self._namer.root
        name = names[index] if count == self.block_size else self._namer.child(parent, held)
        wanted = ExpectedBlock(self.namespace, parent, name, held, self.dtype, self.shape(count))
        return LoadTarget(block, start, wanted, source)
