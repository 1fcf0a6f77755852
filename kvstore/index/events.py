"""The log of added and removed blocks, numbered from 1 at every start of the store.

Pure. A bounded number of events is kept; a watcher that needs older ones begins with a snapshot.
"""

from __future__ import annotations

from enum import Enum
from typing import Generic, TypeVar

from kvstore.index.entries import IndexEntry
from kvstore.limits import KEPT_EVENTS

V = TypeVar("V")


EVENT_BYTES = 270
"""Memory of an event, measured: a removed block's entry is kept for two events."""


class RemovalReason(Enum):
    """Why a block was removed."""

    __hash__ = object.__hash__  # as of ``PutStatus``

    EVICTED = "evicted"
    EXPIRED = "expired"  # partial blocks
    CLEARED = "cleared"
    CORRUPT = "corrupt"  # its bytes are not those that were put


BlockEvent = tuple[IndexEntry[V], RemovalReason | None]
"""A block and why it was removed; ``None``: it was added."""


class EventLog(Generic[V]):
    """A ring buffer. ``last`` is the number of the newest event, 0 before the first."""

    def __init__(self, keep: int = KEPT_EVENTS) -> None:
        self._ring: list[BlockEvent[V] | None] = [None] * keep
        self.last = 0

    @property
    def overhead_bytes(self) -> int:
        """The memory of the events that are kept."""
        return EVENT_BYTES * min(self.last, len(self._ring))

    def add(self, entry: IndexEntry[V], reason: RemovalReason | None = None) -> None:
        """A block was added, or removed for ``reason``."""
        self.last += 1
        self._ring[self.last % len(self._ring)] = (entry, reason)

    def after(self, number: int, limit: int) -> list[BlockEvent[V]] | None:
        """At most ``limit`` events after ``number``, in order; ``None`` if not all are kept."""
        if not self.last - len(self._ring) <= number <= self.last:
            return None
        end = min(self.last, number + limit) + 1
        events = (self._ring[at % len(self._ring)] for at in range(number + 1, end))
        return [event for event in events if event is not None]
