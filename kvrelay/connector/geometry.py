"""Which blocks the store may have for a request, and what each of them must hold. Pure.

With ``L`` tokens and blocks of ``B``: the full blocks by the names the engine gave, and after them
the partial block of the last ``L % B`` tokens (saved by an equal request) or of the last
``(L - 1) % B`` before the final position (saved by the prefill leg, when ``L = P + 1``).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from kvrelay.block import ExpectedBlock, Namer, Namespace
from kvrelay.block.header import MAX_HEADS
from kvrelay.connector.context import PayloadShape
from kvrelay.engine.core.external import BlockContent
from kvrelay.errors import Rejected
from kvstore import Tail
from kvstore.limits import MAX_NAMES


@dataclass(frozen=True, slots=True)
class LookupKeys:
    """What a lookup sends: the names of the full blocks, then alternative partial last blocks.

    ``counts`` are the tokens of each of the ``tails``. ``first_block_hashes`` are those of the
    first block, full and partial, as far as the lookup names it.
    """

    names: tuple[bytes, ...]
    tails: tuple[Tail, ...]
    counts: tuple[int, ...]
    first_block_hashes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """One block of a load, from position ``start``: the pool block, and the content expected in it.

    ``source`` names the store that has it, if there are several.
    """

    block: int
    start: int
    expected: ExpectedBlock
    source: str | None = None

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.expected.count


class Geometry:
    """Blocks of one namespace in one pool's shape."""

    def __init__(self, namer: Namer, namespace: Namespace, shape: PayloadShape) -> None:
        if shape.num_kv_heads > MAX_HEADS:
            raise Rejected("num_kv_heads", f"{shape.num_kv_heads} are more than {MAX_HEADS}")
        self._namespace = namespace.digest
        self.block_size = shape.block_size
        self._namer = namer
        self._pool = shape

    def of(self, space: bytes) -> Geometry:
        """Blocks of the tenant with the salt ``space``; these for the empty ``space``."""
        if not space:
            return self
        tenant = copy(self)
        tenant._namer = self._namer.within(space)
        tenant._namespace = tenant._namer.namespace
        return tenant

    def block(self, parent: bytes, name: bytes, tokens: tuple[int, ...]) -> ExpectedBlock:
        """A block of these tokens; its payload is [kv head, layer, k|v, position, head dim]."""
        pool = self._pool
        shape = (pool.num_kv_heads, pool.num_layers, 2, len(tokens), pool.head_dim)
        return ExpectedBlock(self._namespace, parent, name, tokens, pool.dtype, shape)

    def lookup_keys(self, tokens: Sequence[int], names: Sequence[bytes]) -> LookupKeys:
        """What to look up for a request of ``tokens`` with full blocks ``names``."""
        size = self.block_size
        after = (len(tokens) - 1) // size
        start = after * size
        rests = dict.fromkeys((len(tokens) % size, (len(tokens) - 1) % size))
        counts = tuple(rest for rest in rests if rest)
        parent = names[after - 1] if after else self._namer.root
        tails = tuple(
            Tail(after, self._namer.child(parent, tokens[start : start + count]))
            for count in counts
        )
        firsts = [size] * bool(names) + [count for count in counts if not after]
        hashes = tuple(self._namer.first_block_hash(tokens[:count]) for count in firsts)
        if len(names) > MAX_NAMES:  # blocks of one token and a very long prompt
            return LookupKeys(tuple(names[:MAX_NAMES]), (), (), hashes)
        return LookupKeys(tuple(names), tails, counts, hashes)

    def first_block_hash(self, content: BlockContent) -> int | None:
        """The hash of a block that begins a sequence, ``None`` for any other."""
        first = content.parent == self._namer.root
        return self._namer.first_block_hash(content.tokens) if first else None

    def target(
        self,
        tokens: Sequence[int],
        names: Sequence[bytes],
        index: int,
        count: int,
        block: int,
        source: str | None = None,
    ) -> LoadTarget:
        """The ``index``-th block of a request, of ``count`` positions, to load into ``block``."""
        start = index * self.block_size
        content = tuple(tokens[start : start + count])
        parent = names[index - 1] if index else self._namer.root
        name = names[index] if count == self.block_size else self._namer.child(parent, content)
        return LoadTarget(block, start, self.block(parent, name, content), source)
