"""How tensor-parallel ranks share the heads of a block.

One rank holds all heads: its blocks are kvrelay's canonical ones. With more ranks each contiguous
range of heads is a shard with a namespace, and so with block names, of its own; ranks that hold
copies of the same heads (more ranks than heads) belong to one shard.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrelay.block.namespace import Namespace
from kvrelay.errors import Unservable


@dataclass(frozen=True, slots=True)
class HeadShards:
    """``heads`` KV heads of a model on ``ranks`` ranks."""

    heads: int
    ranks: int

    def __post_init__(self) -> None:
        large, small = max(self.heads, self.ranks), min(self.heads, self.ranks)
        if small < 1 or large % small:
            raise Unservable(f"{self.heads} KV heads cannot be shared evenly by {self.ranks} ranks")

    @property
    def count(self) -> int:
        """The number of shards."""
        return min(self.heads, self.ranks)

    @property
    def width(self) -> int:
        """Heads in one shard."""
        return self.heads // self.count

    def of_rank(self, rank: int) -> int:
        """The shard that a rank holds."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is none of {self.ranks}")
        return rank * self.count // self.ranks

    def namespace(self, whole: Namespace, shard: int) -> Namespace:
        """The namespace of a shard; that of the canonical blocks if there is only one."""
        if self.count == 1:
            return whole
        first = shard * self.width
        heads = f"heads {first} to {first + self.width - 1} of {self.heads}"
        return replace(whole, layout=f"{whole.layout};{heads}")
