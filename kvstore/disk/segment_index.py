"""Which blocks lie on disk and where, and which segment goes first. Pure, no I/O.

Segments are used up whole, the one not used for the longest time first, as in CacheLib's block
cache: nothing is moved and the disk sees long writes only. Using one block uses its segment.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.claims import Claim
from kvstore.index.entries import IndexEntry


@dataclass(slots=True)
class DiskLocation:
    """Where a block lies: ``size`` bytes at ``offset`` of ``segment``. What it is, besides."""

    name: bytes
    parent: bytes | None
    size: int
    tokens: int
    segment: int
    offset: int
    opening: int | None = None


def entry_on_disk(location: DiskLocation) -> IndexEntry[int]:
    """A record of a block that lies on disk only, for those who ask what there is."""
    claim = Claim(location.name, location.size, False, location.opening)
    entry = IndexEntry(claim, 0, location.parent, location.tokens)
    entry.ready = False
    return entry


@dataclass(slots=True)
class _Segment:
    nbytes: int
    names: list[bytes] = field(default_factory=list)


class SegmentIndex:
    """Spots by name, segments by last use. ``bytes`` is what all files have together."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.bytes = 0
        self._locations: dict[bytes, DiskLocation] = {}
        self._segments: OrderedDict[int, _Segment] = OrderedDict()
        self._pins: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._locations)

    def __contains__(self, name: bytes) -> bool:
        return name in self._locations

    def find(self, name: bytes) -> DiskLocation | None:
        """Where it lies."""
        return self._locations.get(name)

    def locations(self) -> list[DiskLocation]:
        """All of them."""
        return list(self._locations.values())

    def holds(self, segment: int) -> bool:
        """Whether the segment has not been used up."""
        return segment in self._segments

    def open(self, segment: int, nbytes: int) -> None:
        """A file that there is from now on, the most recently used."""
        self._segments[segment] = _Segment(nbytes)
        self.bytes += nbytes

    def grow(self, segment: int, nbytes: int) -> None:
        """The file is ``nbytes`` long now."""
        self.bytes += nbytes - self._segments[segment].nbytes
        self._segments[segment].nbytes = nbytes

    def add(self, locations: Iterable[DiskLocation]) -> list[DiskLocation]:
        """Blocks in a segment; those that are new here. What is known already stays where it is."""
        new = [
            s for s in locations if s.segment in self._segments and s.name not in self._locations
        ]
        for location in new:
            self._locations[location.name] = location
            self._segments[location.segment].names.append(location.name)
        return new

    def touch(self, name: bytes) -> None:
        """A block was used."""
        if (location := self._locations.get(name)) is not None:
            self._segments.move_to_end(location.segment)

    def forget(self, location: DiskLocation) -> bool:
        """A block whose bytes are wrong; whether it was still known there."""
        if self._locations.get(location.name) is not location:
            return False
        del self._locations[location.name]
        return True

    def pin(self, segment: int) -> None:
        """A block in it is about to be read: it stays until it is unpinned as often."""
        self._pins[segment] = self._pins.get(segment, 0) + 1

    def unpin(self, segment: int) -> None:
        """The read has ended."""
        self._pins[segment] -= 1
        if not self._pins[segment]:
            del self._pins[segment]

    def needs(self, segment: int) -> bool:
        """Whether its file must stay."""
        return segment in self._segments or segment in self._pins

    def victim(self, spared: int | None) -> int | None:
        """The segment to go next, other than ``spared``."""
        free = (s for s in self._segments if s != spared and s not in self._pins)
        return next(free, None)

    def drop(self, segment: int) -> list[DiskLocation]:
        """Forget a segment; the blocks that are not on disk any more."""
        gone = self._segments.pop(segment)
        self.bytes -= gone.nbytes
        locations = (self._locations.get(name) for name in gone.names)
        lost = [
            location
            for location in locations
            if location is not None and location.segment == segment
        ]
        for location in lost:
            del self._locations[location.name]
        return lost

    def by_age(self) -> list[int]:
        """All of them, the one to go first first."""
        return list(self._segments)
