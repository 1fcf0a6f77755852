"""What a store keeps and for how long; bytes and seconds, and what they are unless told."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.index.events import KEPT_EVENTS
from kvstore.index.eviction.policies import EVICTIONS
from kvstore.index.reservations import ReservationShares

BUDGET = 1 << 30
DISK_BUDGET = 10 << 30
MAX_BLOCK = 256 << 20
PARTIAL_LIFE = 60.0
TICKET_LIFE = 30.0


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Of one service."""

    budget: int
    max_block: int = MAX_BLOCK
    partial_life: float = PARTIAL_LIFE
    ticket_life: float = TICKET_LIFE
    events: int = KEPT_EVENTS
    disk_budget: int | None = None  # none: there is no disk
    eviction: str = EVICTIONS[0]
    leased: int = 1 << 24  # names in all leases of one tenant, each lease 64 more
    shares: ReservationShares = ReservationShares(ticket=1 / 4, all=1 / 2)  # noqa: RUF009 a frozen value
