"""The store's bookkeeping: which blocks there are, who holds them, which go and when.

Pure: time is passed in, nothing blocks, nothing is copied. A block is put in two phases, reserve
then commit, so it is visible whole or not at all and concurrent writers of one name cost one copy.
What a lease holds is neither evicted nor cleared before the lease ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvstore.deadlines import Deadlines
from kvstore.policy import Policy
from kvstore.records import Claim, Grant, Holding, Tail, Verdict
from kvstore.reservations import Reservations
from kvstore.stats import Stats, Tally

V = TypeVar("V")


@dataclass(slots=True)
class _Entry(Generic[V]):
    claim: Claim
    value: V
    leases: int = 0


class Catalog(Generic[V]):
    """Blocks by name, each with a value of which nothing is known here but its size."""

    def __init__(self, budget: int, policy: Policy, partial_life: float, boot: bytes) -> None:
        self._budget, self._policy = budget, policy
        self._partial_life, self._boot = partial_life, boot
        self._entries: dict[bytes, _Entry[V]] = {}
        self._writing = Reservations()
        self._leases: dict[int, tuple[bytes, ...]] = {}
        self._lease_ends: Deadlines[int] = Deadlines()
        self._lives: Deadlines[bytes] = Deadlines()
        self._bytes = self._leased = self._serial = 0
        self.tally = Tally()

    def lookup(
        self, names: Sequence[bytes], tails: Sequence[Tail], ttl: float, now: float
    ) -> Holding:
        """The longest leading run of ``names``, then the first tail there is; held for ``ttl``."""
        self.expire(now)
        lead = next((i for i, name in enumerate(names) if name not in self._entries), len(names))
        tail = next(
            (i for i, t in enumerate(tails) if t.after == lead and t.name in self._entries), None
        )
        found = list(names[:lead]) + ([] if tail is None else [tails[tail].name])
        self.tally.lookups += 1
        self.tally.hits += len(found)
        self.tally.misses += len(names) - lead
        sizes = tuple(self._entries[name].claim.size for name in found)
        lease = self._hold(tuple(found), now + ttl, now) if found and ttl > 0 else None
        return Holding(lead, tail, sizes, lease, now + ttl)

    def get(self, name: bytes, now: float) -> V | None:
        """The block's value, or ``None``; the block counts as just used."""
        self.expire(now)
        entry = self._entries.get(name)
        if entry is None:
            self.tally.absent += 1
            return None
        self._use(name, entry, now)
        self.tally.served += 1
        self.tally.bytes_out += entry.claim.size
        return entry.value

    def reserve(self, claims: Sequence[Claim], ttl: float, now: float) -> Grant:
        """Room for those of ``claims`` that nobody has put or is putting, under one ticket."""
        self.expire(now)
        for claim in reversed(claims):
            if (entry := self._entries.get(claim.name)) is not None:
                self._use(claim.name, entry, now)
        self._serial += 1
        self._writing.open(self._serial, now + ttl)
        verdicts = tuple(self._claim(claim, self._serial) for claim in claims)
        ended = self._writing.close_if_empty(self._serial)
        return Grant(None if ended else self._serial, now + ttl, verdicts)

    def reserved(self, ticket: int, name: bytes) -> Claim | None:
        """What was claimed, while the reservation stands."""
        return self._writing.find(ticket, name)

    def is_being_written(self, name: bytes) -> bool:
        """Whether a reservation stands for it."""
        return name in self._writing

    def prolong(self, ticket: int, deadline: float) -> None:
        """The writer makes progress: its reservations end later."""
        self._writing.prolong(ticket, deadline)

    def commit(self, ticket: int, name: bytes, value: V, now: float) -> bool:
        """Make a reserved block visible; false when the reservation has run out."""
        self.expire(now)
        if (claim := self._writing.take(ticket, name)) is None:
            return False
        self._entries[name] = _Entry(claim, value)
        self._bytes += claim.size
        self._policy.add(name)
        if claim.partial:
            self._lives.set(name, now + self._partial_life)
        self.tally.stored += 1
        self.tally.bytes_in += claim.size
        return True

    def abandon(self, ticket: int, names: Iterable[bytes] | None = None) -> None:
        """Give up reservations of a ticket: those named, or all that are left."""
        for name in self._writing.names(ticket) if names is None else names:
            if self._writing.take(ticket, name) is not None:
                self.tally.abandoned += 1

    def release(self, lease: int) -> None:
        """End a lease early; unknown ones have ended already."""
        self._lease_ends.drop(lease)
        for name in reversed(self._leases.pop(lease, ())):
            entry = self._entries[name]
            entry.leases -= 1
            if entry.leases == 0:
                self._leased -= entry.claim.size
                self._policy.add(name)

    def clear(self, now: float) -> int:
        """Remove every block that no lease holds; how many."""
        self.expire(now)
        idle = [name for name, entry in self._entries.items() if entry.leases == 0]
        for name in idle:
            self._remove(name)
        self.tally.cleared += len(idle)
        return len(idle)

    def expire(self, now: float) -> None:
        """End the leases, reservations and partial blocks whose time is over."""
        for lease in self._lease_ends.due(now):
            self.release(lease)
        for ticket in self._writing.due(now):
            self.abandon(ticket)
        for name in list(self._lives.due(now)):
            if self._entries[name].leases:
                self._lives.set(name, now + self._partial_life)
            else:
                self._remove(name)
                self.tally.expired += 1

    def stats(self) -> Stats:
        """A reading; the tally in it is a copy."""
        return Stats(
            self._boot, self._budget, len(self._entries), self._bytes + self._writing.bytes,
            self._writing.bytes, self._leased, len(self._leases), len(self._writing),
            dataclasses.replace(self.tally),
        )  # fmt: skip

    def audit(self) -> list[str]:
        """Sums that do not agree; empty unless there is a bug."""
        entries = self._entries.values()
        held = sum(len(names) for names in self._leases.values())
        sums = {
            "bytes": (self._bytes, sum(entry.claim.size for entry in entries)),
            "leased": (self._leased, sum(e.claim.size for e in entries if e.leases)),
            "leases": (held, sum(entry.leases for entry in entries)),
            "deadlines": (len(self._lease_ends), len(self._leases)),
            "lives": (len(self._lives), sum(entry.claim.partial for entry in entries)),
            "budget": (max(self._bytes + self._writing.bytes, self._budget), self._budget),
        }
        return [f"{what}: {one} is not {two}" for what, (one, two) in sums.items() if one != two]

    def _hold(self, names: tuple[bytes, ...], deadline: float, now: float) -> int:
        self._serial += 1
        for name in names:
            entry = self._entries[name]
            self._use(name, entry, now)
            if entry.leases == 0:
                self._policy.remove(name)
                self._leased += entry.claim.size
            entry.leases += 1
        self._leases[self._serial] = names
        self._lease_ends.set(self._serial, deadline)
        return self._serial

    def _use(self, name: bytes, entry: _Entry[V], now: float) -> None:
        self._policy.touch(name)
        if entry.claim.partial:
            self._lives.set(name, now + self._partial_life)

    def _claim(self, claim: Claim, ticket: int) -> Verdict:
        if claim.name in self._entries:
            self.tally.existed += 1
            return Verdict.EXISTS
        if claim.name in self._writing:
            self.tally.pending += 1
            return Verdict.PENDING
        if not self._make_room(claim.size):
            self.tally.rejected += 1
            return Verdict.NO_ROOM
        self._writing.add(ticket, claim)
        return Verdict.RESERVED

    def _make_room(self, size: int) -> bool:
        if self._leased + self._writing.bytes + size > self._budget:
            return False
        while self._bytes + self._writing.bytes + size > self._budget:
            victim = self._policy.victim()
            if victim is None:
                return False
            self._remove(victim)
            self.tally.evicted += 1
        return True

    def _remove(self, name: bytes) -> None:
        self._policy.remove(name)
        self._lives.drop(name)
        self._bytes -= self._entries.pop(name).claim.size
