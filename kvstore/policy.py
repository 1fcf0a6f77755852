"""Which block goes first when the store is full.

A policy sees only blocks that may go: what is leased is taken out of it and put back afterwards,
so a victim is found without searching.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol


class Policy(Protocol):
    """Order among the blocks that nobody holds."""

    def add(self, name: bytes) -> None:
        """``name`` may be evicted from now on, and was just used."""

    def touch(self, name: bytes) -> None:
        """``name``, if it is in here, was just used."""

    def remove(self, name: bytes) -> None:
        """``name`` is gone or held; not to be a victim until added again."""

    def victim(self) -> bytes | None:
        """The block to go next, left in place; ``None`` when there is none."""


class LeastRecentlyUsed:
    """The block that was not used for the longest time goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def add(self, name: bytes) -> None:
        """As the protocol says."""
        self._order[name] = None
        self._order.move_to_end(name)

    def touch(self, name: bytes) -> None:
        """As the protocol says."""
        if name in self._order:
            self._order.move_to_end(name)

    def remove(self, name: bytes) -> None:
        """As the protocol says."""
        self._order.pop(name, None)

    def victim(self) -> bytes | None:
        """As the protocol says."""
        return next(iter(self._order), None)
