"""Blocks that are being written: who may commit what, and how much room is kept for them."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.deadlines import Deadlines
from kvstore.records import Claim


class Reservations:
    """Tickets, each with the claims not yet committed. A name has at most one writer."""

    def __init__(self) -> None:
        self._tickets: dict[int, dict[bytes, Claim]] = {}
        self._writers: set[bytes] = set()
        self._ends: Deadlines[int] = Deadlines()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._writers)

    def __contains__(self, name: bytes) -> bool:
        return name in self._writers

    def open(self, ticket: int, deadline: float) -> None:
        """A new ticket, without claims; it ends by itself at ``deadline``."""
        self._tickets[ticket] = {}
        self._ends.set(ticket, deadline)

    def add(self, ticket: int, claim: Claim) -> None:
        """``ticket`` is the one writer of this claim from now on."""
        self._tickets[ticket][claim.name] = claim
        self._writers.add(claim.name)
        self.bytes += claim.size

    def find(self, ticket: int, name: bytes) -> Claim | None:
        """The claim, while it stands."""
        return self._tickets.get(ticket, {}).get(name)

    def names(self, ticket: int) -> list[bytes]:
        """What ``ticket`` has not committed yet."""
        return list(self._tickets.get(ticket, ()))

    def take(self, ticket: int, name: bytes) -> Claim | None:
        """End one claim; the ticket ends with its last one."""
        claim = self._tickets.get(ticket, {}).pop(name, None)
        if claim is not None:
            self._writers.remove(name)
            self.bytes -= claim.size
            self.close_if_empty(ticket)
        return claim

    def close_if_empty(self, ticket: int) -> bool:
        """End a ticket without claims; whether it has ended."""
        if self._tickets.get(ticket):
            return False
        self._tickets.pop(ticket, None)
        self._ends.drop(ticket)
        return True

    def prolong(self, ticket: int, deadline: float) -> None:
        """Move the end of a ticket that still stands."""
        if ticket in self._tickets:
            self._ends.set(ticket, deadline)

    def quiet(self, now: float) -> bool:
        """Whether certainly no ticket's time is over."""
        return self._ends.quiet(now)

    def due(self, now: float) -> Iterator[int]:
        """Tickets whose time is over."""
        return self._ends.due(now)
