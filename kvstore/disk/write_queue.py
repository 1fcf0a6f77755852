"""The write-behind queue of the disk: blocks in the order in which they were stored. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvstore.index.entries import IndexEntry


class WriteQueue:
    """Waiting blocks by name, and the number being written; ``len`` is the sum of both."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, IndexEntry[int]] = {}
        self._reservations = 0

    def __len__(self) -> int:
        return len(self._waiting) + self._reservations

    def __iter__(self) -> Iterator[bytes]:
        """The names of the waiting blocks."""
        return iter(self._waiting)

    def add(self, entry: IndexEntry[int]) -> None:
        """Queue a block, if it is not waiting."""
        self._waiting[entry.name] = entry

    def drop(self, name: bytes) -> bool:
        """Remove a block from the queue; returns whether it was waiting."""
        return self._waiting.pop(name, None) is not None

    def take(self, limit: int) -> list[IndexEntry[int]]:
        """The next blocks, about ``limit`` bytes, to write; ``end`` must follow."""
        batch: list[IndexEntry[int]] = []
        size = 0
        for entry in self._waiting.values():
            if batch and size + entry.size > limit:
                break
            size += entry.size
            batch.append(entry)
        for entry in batch:
            del self._waiting[entry.name]
        self._reservations += len(batch)
        return batch

    def end(self, count: int, again: Iterable[IndexEntry[int]] = ()) -> None:
        """The write of ``count`` blocks has ended; blocks to write ``again`` go first."""
        self._reservations -= count
        self._waiting = {**{entry.name: entry for entry in again}, **self._waiting}
