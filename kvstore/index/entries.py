"""One block of the index, and where blocks lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvstore.base import Lease
from kvstore.claims import Claim
from kvstore.index.eviction.policy import EvictionNode

V = TypeVar("V")


class PlaceAllocator(Protocol[V]):
    """Where blocks lie."""

    def take(self, size: int) -> V | None:
        """A place for ``size`` bytes, ``None`` when there is none."""

    def give(self, place: V, size: int) -> None:
        """Nobody uses the place any more."""


class IndexEntry(EvictionNode, Generic[V]):
    """A block that is there, of ``tokens`` positions; ``leases`` is how many hold it.

    ``ready`` is false once its bytes turned out to be wrong. With a tier below it is also false
    until they have come from there, ``grips`` are the reads and writes under way at its place, and
    ``again`` says that it was used since it was saved.
    """

    __slots__ = (
        "io_count",
        "leases",
        "opening",
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
        self.opening = claim.opening
        self.ready = True
        self.io_count = 0
        self.reused = False


@dataclass(frozen=True, slots=True)
class Located(Generic[V]):
    """Size and value of each block asked for, ``None`` for absent blocks; held by ``lease``."""

    blocks: tuple[tuple[int, V] | None, ...]
    lease: Lease | None
