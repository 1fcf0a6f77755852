"""The index of the disk: which blocks are on it, where, and which segment is dropped next. Pure.

Whole segments are dropped, least recently used first, as in CacheLib's block cache: nothing is
moved and the disk sees only long writes. The use of a block is a use of its segment.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.claims import Claim
from kvstore.index.entries import IndexEntry

LOCATION_BYTES = 340
"""Memory of a block's location, measured."""


@dataclass(slots=True)
class DiskLocation:
    """A block on disk: ``size`` bytes at ``offset`` of ``segment``."""

    name: bytes
    parent: bytes | None
    size: int
    tokens: int
    segment: int
    offset: int
    first_block_hash: int | None = None


def entry_on_disk(location: DiskLocation) -> IndexEntry[int]:
    """An index entry for a block that is on disk only, for listings and events."""
    claim = Claim(location.name, location.size, False, location.first_block_hash)
    entry = IndexEntry(claim, 0, location.parent, location.tokens)
    entry.ready = False
    return entry


@dataclass(slots=True)
class _Segment:
    nbytes: int
    names: list[bytes] = field(default_factory=list)


class SegmentIndex:
    """Locations by name, segments by last use. ``bytes`` is the sum of all files."""

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
        """The location of a block."""
        return self._locations.get(name)

    def locations(self) -> list[DiskLocation]:
        """All locations."""
        return list(self._locations.values())

    def holds(self, segment: int) -> bool:
        """Whether the segment is in the index."""
        return segment in self._segments

    def open(self, segment: int, nbytes: int) -> None:
        """Add a segment, the most recently used one."""
        self._segments[segment] = _Segment(nbytes)
        self.bytes += nbytes

    def grow(self, segment: int, nbytes: int) -> None:
        """A segment's file is now ``nbytes`` long."""
        self.bytes += nbytes - self._segments[segment].nbytes
        self._segments[segment].nbytes = nbytes

    def add(self, locations: Iterable[DiskLocation]) -> list[DiskLocation]:
        """Add blocks of a segment; returns the new ones. A known block keeps its location."""
        new = [
            s for s in locations if s.segment in self._segments and s.name not in self._locations
        ]
        for location in new:
            self._locations[location.name] = location
            self._segments[location.segment].names.append(location.name)
        return new

    def touch(self, name: bytes) -> None:
        """A block was used, and so its segment."""
        if (location := self._locations.get(name)) is not None:
            self._segments.move_to_end(location.segment)

    def forget(self, location: DiskLocation) -> bool:
        """Forget a block whose bytes are wrong; returns whether this was its location."""
        if self._locations.get(location.name) is not location:
            return False
        del self._locations[location.name]
        return True

    def pin(self, segment: int) -> None:
        """A block of the segment is to be read: keep its file until ``unpin``."""
        self._pins[segment] = self._pins.get(segment, 0) + 1

    def unpin(self, segment: int) -> None:
        """A read has ended."""
        self._pins[segment] -= 1
        if not self._pins[segment]:
            del self._pins[segment]

    def needs(self, segment: int) -> bool:
        """Whether the segment's file must stay."""
        return segment in self._segments or segment in self._pins

    def victim(self, spared: int | None) -> int | None:
        """The segment to drop next, other than ``spared``."""
        free = (s for s in self._segments if s != spared and s not in self._pins)
        return next(free, None)

    def drop(self, segment: int) -> list[DiskLocation]:
        """Drop a segment; returns the blocks that are no longer on disk."""
        dropped = self._segments.pop(segment)
        self.bytes -= dropped.nbytes
        locations = (self._locations.get(name) for name in dropped.names)
        lost = [
            location
            for location in locations
            if location is not None and location.segment == segment
        ]
        for location in lost:
            del self._locations[location.name]
        return lost

    def by_age(self) -> list[int]:
        """The segments, least recently used first."""
        return list(self._segments)
