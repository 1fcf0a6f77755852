"""The places of blocks that are being written, until a writer borrows them. Pure."""

from __future__ import annotations

from typing import Generic, TypeVar

from kvstore.book.entries import Room
from kvstore.records import Claim

V = TypeVar("V")


class Places(Generic[V]):
    """Taken from ``room``; without one, blocks have no place and there is always room."""

    def __init__(self, room: Room[V] | None) -> None:
        self._room = room
        self._taken: dict[bytes, V] = {}

    def take(self, claim: Claim) -> bool:
        """A place for a block; false when there is none in one piece."""
        if self._room is None:
            return True
        place = self._room.take(claim.size)
        if place is not None:
            self._taken[claim.name] = place
        return place is not None

    def borrow(self, name: bytes) -> V | None:
        """The place taken for a block, once: whoever has it gives it back."""
        return self._taken.pop(name, None)

    def give(self, place: V, size: int) -> None:
        """Nobody uses the place any more."""
        if self._room is not None:
            self._room.give(place, size)
