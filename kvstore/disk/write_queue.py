"""Which blocks are to be written to disk, in the order in which they came. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvstore.index.entries import IndexEntry


class WriteQueue:
    """Those that wait, by name, and how many are being written; ``len`` is both."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, IndexEntry[int]] = {}
        self._reservations = 0

    def __len__(self) -> int:
        return len(self._waiting) + self._reservations

    def __iter__(self) -> Iterator[bytes]:
        """The names of those that wait."""
        return iter(self._waiting)

    def add(self, entry: IndexEntry[int]) -> None:
        """It waits from now on, if it did not before."""
        self._waiting[entry.name] = entry

    def drop(self, name: bytes) -> bool:
        """It is not to be written any more; whether it waited."""
        return self._waiting.pop(name, None) is not None

    def take(self, limit: int) -> list[IndexEntry[int]]:
        """The next ones, of about ``limit`` bytes, to write; ``end`` must follow."""
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
        """So many are not being written any more; those to write ``again`` come first."""
        self._reservations -= count
        self._waiting = {**{entry.name: entry for entry in again}, **self._waiting}
