"""Figures of the disk tier."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DiskCounters:
    """Counts in blocks unless said otherwise, since the start. They only grow."""

    written: int = 0
    read: int = 0  # brought back into memory
    restored: int = 0  # found at the start
    dropped: int = 0  # there was no room for them any more
    skipped: int = 0  # left memory before they were written, or are too large
    failed: int = 0  # writes that the system refused; they are tried again
    corrupt: int = 0  # were not what had been written, when they were read
    damaged: int = 0  # records that were not whole, at the start
    bytes_written: int = 0
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class DiskStats:
    """One reading. ``bytes`` are those of all files, ``unsaved`` blocks are yet to be written."""

    budget: int
    bytes: int
    entries: int
    unsaved: int
    tally: DiskCounters
