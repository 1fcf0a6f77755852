"""Figures of a store: what it holds now, and what it has done since it started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Counts of events, in blocks unless said otherwise. They only grow."""

    lookups: int = 0  # calls
    hits: int = 0  # names a lookup found
    misses: int = 0  # names a lookup asked for and did not find
    served: int = 0  # blocks handed out by a get
    absent: int = 0  # blocks a get asked for that were not there
    stored: int = 0
    existed: int = 0  # put again, and not copied
    pending: int = 0  # put while another writer was at it
    rejected: int = 0  # no room
    corrupt: int = 0  # refused: not what the header says
    abandoned: int = 0  # reservations given up or run out
    evicted: int = 0
    expired: int = 0  # partial blocks whose life was over
    cleared: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """One reading. ``bytes`` include what is reserved; ``leased_bytes`` cannot be evicted now."""

    boot: bytes
    budget: int
    entries: int
    bytes: int
    reserved_bytes: int
    leased_bytes: int
    leases: int
    reservations: int
    tally: Tally
