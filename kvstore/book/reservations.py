"""Blocks that are being written: who may commit what, and how much room is kept for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.book.deadlines import Deadlines
from kvstore.book.keys import prefix_of
from kvstore.records import Claim


@dataclass(frozen=True, slots=True)
class Shares:
    """Parts of the budget that one ticket and all of them may reserve at once.

    A reservation evicts what is there before a byte of it has come. ``owners`` are those that
    share the budget: none of them may take what the others write into.
    """

    ticket: float
    all: float
    owners: int = 1


WHOLE = Shares(1.0, 1.0)


class Reservations(set[bytes]):
    """Names that are being written, each by one ticket, until it is committed."""

    def __init__(self, budget: int, shares: Shares = WHOLE) -> None:
        super().__init__()
        part = budget / shares.owners
        self._of_ticket, self._of_owner = part * shares.ticket, part * shares.all
        self._owned: Counter[bytes] = Counter()
        self._tickets: dict[int, dict[bytes, Claim]] = {}
        self._ends: Deadlines[int] = Deadlines()
        self._sizes: dict[int, int] = {}
        self.bytes = 0

    def open(self, ticket: int, deadline: float) -> None:
        """A new ticket, without claims; it ends by itself at ``deadline``."""
        self._tickets[ticket], self._sizes[ticket] = {}, 0
        self._ends.set(ticket, deadline)

    def give(self, ticket: int, claim: Claim) -> None:
        """``ticket`` is the one writer of this claim from now on."""
        self._tickets[ticket][claim.name] = claim
        self.add(claim.name)
        self._sizes[ticket] += claim.size
        self._owned[prefix_of(claim.name)] += claim.size
        self.bytes += claim.size

    def is_full(self, ticket: int, size: int) -> bool:
        """Whether so many bytes more exceed a ticket's share: the rest is for another ticket.

        One block it may have, whatever its size.
        """
        return self._sizes[ticket] > 0 and self._sizes[ticket] + size > self._of_ticket

    def allows(self, claim: Claim) -> bool:
        """Whether it may be reserved beside the others of its owner; alone any block may."""
        owned = self._owned[prefix_of(claim.name)]
        return owned == 0 or owned + claim.size <= self._of_owner

    def owner(self, ticket: int) -> bytes | None:
        """The tenant's part of the keys of a ticket, which has claims while it stands."""
        key = next(iter(self._tickets.get(ticket, ())), None)
        return None if key is None else prefix_of(key)

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
            self.remove(name)
            self._sizes[ticket] -= claim.size
            self._owned[prefix_of(name)] -= claim.size
            self.bytes -= claim.size
            self.close_if_empty(ticket)
        return claim

    def close_if_empty(self, ticket: int) -> bool:
        """End a ticket without claims; whether it has ended."""
        if self._tickets.get(ticket):
            return False
        self._tickets.pop(ticket, None)
        self._sizes.pop(ticket, None)
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
