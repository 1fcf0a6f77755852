"""What a store keeps and for how long, and the bounds of its protocol. Bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass

BUDGET = 1 << 30
DISK_BUDGET = 10 << 30
MAX_BLOCK = 256 << 20
PARTIAL_LIFE = 60.0
TICKET_LIFE = 30.0
KEPT_EVENTS = 1 << 15

RETURNS = "returns"
LRU = "lru"
EVICTIONS = (RETURNS, LRU)
"""The eviction policies by name; the first is the default."""

MAX_NAMES = 1 << 16
MAX_TAILS = 16
MAX_FIRST_BLOCK_HASHES = 16
MAX_LEASE_MS = 600_000
MAX_SMALL = 1 << 20
"""Bytes of one ``PutSmall``."""

MAX_HINTS = 1 << 10
"""Hints in one message; they name ``MAX_NAMES`` blocks at most."""
MAX_SOON_MS = 600_000
MAX_LATE_MS = 86_400_000
"""How long a hint holds at most. One of late use keeps nothing, and old ones must not end first."""
MAX_TENANT = 256
"""Characters of a tenant's name in a hint."""
MAX_RUNS = 1 << 12
"""Hints of use soon in force at once."""
HINTED_SHARE = 3 / 4
"""The part of the memory for services' blocks that hints may keep."""
TENANT_HINTED_SHARE = 1 / 4
"""The part of it for the hints of one tenant that has no ``store-bytes``."""


@dataclass(frozen=True, slots=True)
class ReservationShares:
    """Fractions of the budget that one ticket, and all tickets together, may reserve at once.

    A reservation evicts blocks before its first byte arrives. ``owners`` is the number of tenants
    that share the budget: each has an equal part for its reservations.
    """

    ticket: float
    all: float
    owners: int = 1


WHOLE_BUDGET = ReservationShares(1.0, 1.0)
SERVICE_SHARES = ReservationShares(ticket=1 / 4, all=1 / 2)


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of one store service."""

    budget: int
    max_block: int = MAX_BLOCK
    partial_life: float = PARTIAL_LIFE
    ticket_life: float = TICKET_LIFE
    events: int = KEPT_EVENTS
    disk_budget: int | None = None  # none: there is no disk
    eviction: str = EVICTIONS[0]
    leased: int = 1 << 24  # names in all leases of one tenant; each lease counts 64 more
    shares: ReservationShares = SERVICE_SHARES
