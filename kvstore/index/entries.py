"""An entry of the index, and the interface of the memory that blocks are placed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvstore.base import Lease
from kvstore.claims import Claim
from kvstore.index.eviction.policy import EvictionNode

V = TypeVar("V")


class PlaceAllocator(Protocol[V]):
    """Memory that blocks are placed in."""

    def take(self, size: int) -> V | None:
        """A place for ``size`` bytes, ``None`` if there is no room."""

    def give(self, place: V, size: int) -> None:
        """Give a place back."""


class IndexEntry(EvictionNode, Generic[V]):
    """A stored block of ``tokens`` positions; ``leases`` is the number of leases that hold it.

    ``ready`` is false once its bytes have proved wrong. With a disk tier it is also false until
    they are loaded, ``io_count`` is the number of reads and writes under way at its place, and
    ``reused`` says that the block was leased after it was saved.
    """

    __slots__ = (
        "first_block_hash",
        "io_count",
        "leases",
        "ready",
        "reused",
        "size",
        "tokens",
        "value",
    )

    def __init__(self, claim: Claim, value: V, parent: bytes | None, tokens: int) -> None:
        super().__init__(claim.name, parent, claim.partial)
        self.size = claim.size
        self.value = value
        self.leases = 0
        self.tokens = tokens
        self.first_block_hash = claim.first_block_hash
        self.ready = True
        self.io_count = 0
        self.reused = False


@dataclass(frozen=True, slots=True)
class Located(Generic[V]):
    """Size and value of each block asked for, ``None`` for absent blocks; held by ``lease``."""

    blocks: tuple[tuple[int, V] | None, ...]
    lease: Lease | None
