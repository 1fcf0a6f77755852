"""Reservations: which ticket may commit which block, and the room that is kept for them. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvstore.claims import Claim, prefix_of
from kvstore.index.deadlines import Deadlines
from kvstore.limits import WHOLE_BUDGET, ReservationShares

V = TypeVar("V")

Borrowed = tuple[Claim, V] | None
"""A claim and its place; ``None`` if the reservation has ended."""


class Reservation(Generic[V]):
    """A claim and the place kept for it, ``None`` once its writer has borrowed the place."""

    __slots__ = ("claim", "place", "ticket")

    def __init__(self, ticket: int, claim: Claim, place: V | None) -> None:
        self.ticket = ticket
        self.claim = claim
        self.place = place


@dataclass(slots=True)
class _Ticket:
    names: dict[bytes, None] = field(default_factory=dict)
    bytes: int = 0
    full: bool = False


class Reservations(dict[bytes, Reservation[V]]):
    """Reservations by name: each block is written under one ticket, which commits it.

    The caller ends the tickets that are due by ``ends``.
    """

    def __init__(self, budget: int, shares: ReservationShares = WHOLE_BUDGET) -> None:
        super().__init__()
        part = budget / shares.owners
        self._of_ticket = part * shares.ticket
        self._of_owner = part * shares.all
        self._owned: Counter[bytes] = Counter()
        self._tickets: dict[int, _Ticket] = {}
        self.ends: Deadlines[int] = Deadlines()
        self.bytes = 0

    def open(self, ticket: int, deadline: float) -> None:
        """Open a ticket without claims; it ends by itself at ``deadline``."""
        self._tickets[ticket] = _Ticket()
        self.ends.set(ticket, deadline)

    def is_open(self, ticket: int) -> bool:
        """Whether the ticket has not ended."""
        return ticket in self._tickets

    def add(self, writing: Reservation[V]) -> None:
        """Add a reservation; its ticket is the only writer of the block from now on."""
        claim, ticket = writing.claim, self._tickets[writing.ticket]
        self[claim.name] = writing
        ticket.names[claim.name] = None
        ticket.bytes += claim.size
        self._owned[prefix_of(claim.name)] += claim.size
        self.bytes += claim.size

    def is_full(self, ticket: int, size: int) -> bool:
        """Whether ``size`` more bytes exceed a ticket's share. One block of any size is allowed.

        A full ticket stays full: a smaller block may be the child of one that was refused.
        """
        owner = self._tickets[ticket]
        owner.full |= owner.bytes > 0 and owner.bytes + size > self._of_ticket
        return owner.full

    def allows(self, claim: Claim) -> bool:
        """Whether the claim fits its tenant's share. One block of any size fits."""
        owned = self._owned[prefix_of(claim.name)]
        return owned == 0 or owned + claim.size <= self._of_owner

    def owner(self, ticket: int) -> bytes | None:
        """The tenant prefix of a ticket; ``None`` if the ticket has ended."""
        key = next(iter(self.names(ticket)), None)
        return None if key is None else prefix_of(key)

    def find(self, ticket: int, name: bytes) -> Reservation[V] | None:
        """The reservation of a block under a ticket, if there is one."""
        found = self.get(name)
        return found if found is not None and found.ticket == ticket else None

    def borrow(self, ticket: int, name: bytes) -> Borrowed[V]:
        """Hand out a claim and its place, once; the borrower gives the place back."""
        found = self.find(ticket, name)
        if found is None or (place := found.place) is None:
            return None
        found.place = None
        return found.claim, place

    def names(self, ticket: int) -> list[bytes]:
        """The blocks that ``ticket`` has not committed yet."""
        found = self._tickets.get(ticket)
        return [] if found is None else list(found.names)

    def take(self, ticket: int, name: bytes) -> Reservation[V] | None:
        """End one reservation; the ticket ends with its last one."""
        if (found := self.find(ticket, name)) is None:
            return None
        size = found.claim.size
        owner = self._tickets[ticket]
        del self[name]
        del owner.names[name]
        owner.bytes -= size
        self._owned[prefix_of(name)] -= size
        self.bytes -= size
        if not owner.names:
            self.close_if_empty(ticket)
        return found

    def close_if_empty(self, ticket: int) -> bool:
        """End a ticket if it has no claims; returns whether it has ended."""
        found = self._tickets.get(ticket)
        if found is not None and found.names:
            return False
        self._tickets.pop(ticket, None)
        self.ends.drop(ticket)
        return True

    def extend_ticket(self, ticket: int, deadline: float) -> None:
        """Move the end of an open ticket."""
        if ticket in self._tickets:
            self.ends.set(ticket, deadline)
