"""One block of the catalog, and where blocks lie."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from kvstore.policy import Node
from kvstore.records import Claim

V = TypeVar("V")


class Room(Protocol[V]):
    """Where blocks lie."""

    def take(self, size: int) -> V | None:
        """A place for ``size`` bytes, ``None`` when there is none."""

    def give(self, place: V, size: int) -> None:
        """Nobody uses the place any more."""


class Entry(Node, Generic[V]):
    """A block that is there, of ``tokens`` positions; ``leases`` is how many hold it."""

    __slots__ = ("leases", "opening", "partial", "size", "tokens", "value")

    def __init__(self, claim: Claim, value: V, parent: bytes | None, tokens: int) -> None:
        super().__init__(claim.name, parent)
        self.size, self.partial, self.value, self.leases = claim.size, claim.partial, value, 0
        self.tokens = tokens
        self.opening = claim.opening
