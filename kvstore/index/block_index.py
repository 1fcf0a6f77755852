"""The index of a store: which blocks are stored, which leases hold them, which are evicted when.

Pure: time is passed in, nothing blocks, nothing is copied. A block is put in two phases, reserve
then commit, so it is visible whole or not at all and concurrent writers of one name cost one copy.
A leased block is neither evicted nor cleared. A corrupt block is removed at once, but its place is
reused only when the last lease on it has ended.

With a ``PlaceAllocator`` every block has a place from its reservation on. A place has one owner at
a time: the reservation, the writer that borrowed it, or the block.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvrelay.usage import Miss
from kvstore.base import Lease, LookupResult, PutStatus, SurveyResult, Tail
from kvstore.claims import Claim, Grant, prefix_of
from kvstore.index.entries import IndexEntry, Located, PlaceAllocator
from kvstore.index.events import EventLog, RemovalReason
from kvstore.index.eviction.hints import Hint
from kvstore.index.eviction.policy import EvictionPolicy
from kvstore.index.eviction.victims import QuotaPolicy, ReportFailure, ignore_failure
from kvstore.index.reservations import Borrowed, Reservation, Reservations
from kvstore.index.stored_blocks import StoredBlocks
from kvstore.index.tombstones import MISS_REASONS, Tombstones
from kvstore.limits import KEPT_EVENTS, WHOLE_BUDGET, ReservationShares
from kvstore.stats import StoreCounters, StoreStats

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """Sizes in bytes. ``boot`` tells this start of the store from every other.

    ``entry_bytes`` is the memory of one block besides its place; ``events`` is how many events are
    kept for watchers.
    """

    budget: int
    partial_life: float
    boot: bytes
    entry_bytes: int = 0
    events: int = KEPT_EVENTS
    shares: ReservationShares = WHOLE_BUDGET


class BlockIndex(Generic[V]):
    """Blocks by name, each with a value of which only the size is known here."""

    def __init__(
        self,
        options: IndexOptions,
        policy: EvictionPolicy | QuotaPolicy[V],
        allocator: PlaceAllocator[V] | None = None,
        report: ReportFailure = ignore_failure,
    ) -> None:
        self._options = options
        self._allocator = allocator
        self._serial = 0
        self._entries: StoredBlocks[V] = StoredBlocks(policy, options.partial_life, report)
        self.reservations: Reservations[V] = Reservations(options.budget, options.shares)
        self._tombstones = Tombstones()
        self.counters = StoreCounters()
        self.events: EventLog[V] = EventLog(options.events)

    def lookup(
        self,
        names: Sequence[bytes],
        tails: Sequence[Tail],
        ttl: float,
        now: float,
        first_block_hashes: Sequence[int] = (),
    ) -> LookupResult:
        """Find the longest leading run of ``names``, then the first tail; held for ``ttl``."""
        self.expire(now)
        lead = self._lead(names, held=ttl > 0)
        tail = next(
            (i for i, t in enumerate(tails) if t.after == lead and t.name in self._entries), None
        )
        found = list(names[:lead]) + ([] if tail is None else [tails[tail].name])
        self.counters.lookups += 1
        self.counters.hits += len(found)
        self.counters.misses += len(names) - lead
        held = [self._entries[name] for name in found] if ttl > 0 else []
        sizes = tuple([entry.size for entry in held]) if held else self._sizes(found)
        lease = self._hold(held, now + ttl, now) if held else None
        # Even with a tail a full block of later tokens can be missing.
        there = tail is not None or (lead == len(names) and not any(t.after == lead for t in tails))
        wanted = [*names[lead : lead + 1], *(t.name for t in tails if t.after == lead)]
        missing = (
            None if there else self._miss_reason(wanted, first_block_hashes if lead == 0 else ())
        )
        return LookupResult(lead, tail, sizes, lease, missing=missing, boot=self._options.boot)

    def _miss_reason(self, wanted: Sequence[bytes], first_block_hashes: Sequence[int] = ()) -> Miss:
        """Why none of ``wanted``, alternatives for the same positions, is stored."""
        if any(name in self.reservations for name in wanted):
            return Miss.TOO_LATE
        return self._tombstones.reason(wanted, first_block_hashes)

    def survey(
        self, names: Sequence[bytes], ttl: float, now: float, first_block_hashes: Sequence[int] = ()
    ) -> SurveyResult:
        """Find each of ``names`` by itself; held for ``ttl``."""
        self.expire(now)
        found = {name: self._entries[name] for name in names if name in self._entries}
        sizes = tuple(found[name].size if name in found else None for name in names)
        self.counters.lookups += 1
        self.counters.hits += len(names) - sizes.count(None)
        self.counters.misses += sizes.count(None)
        lease = self._hold(found.values(), now + ttl, now) if found and ttl > 0 else None
        misses = tuple(None if name in found else self._miss_reason([name]) for name in names)
        return SurveyResult(sizes, lease, misses, self._tombstones.elsewhere(first_block_hashes))

    def get(self, name: bytes, now: float) -> V | None:
        """The block's value, or ``None``; the block counts as used now."""
        self.expire(now)
        entry = self._entries.get(name)
        if entry is None:
            self.counters.absent += 1
            return None
        self._entries.use(entry, now)
        self.counters.served += 1
        self.counters.bytes_out += entry.size
        return entry.value

    def locate(self, names: Sequence[bytes], ttl: float, now: float) -> Located[V]:
        """Size and value of each of ``names`` that is stored, under one lease."""
        self.expire(now)
        there = {name: self._entries[name] for name in names if name in self._entries}
        found = {name: entry for name, entry in there.items() if entry.ready}
        lease = self._hold(found.values(), now + ttl, now) if found else None
        entries = [found.get(name) for name in names]
        served = [entry.size for entry in entries if entry is not None]
        self.counters.served += len(served)
        self.counters.absent += len(names) - len(served)
        self.counters.bytes_out += sum(served)
        return Located(tuple(None if e is None else (e.size, e.value) for e in entries), lease)

    def lend(self, lease: int, first: int, count: int, now: float) -> Located[V]:
        """Blocks that a lease holds, leased to their reader as well; none if it has ended."""
        self.expire(now)
        if (held := self._entries.leases.blocks(lease)) is None:
            return Located((), None)
        held = held[first : first + count]
        return Located(tuple((e.size, e.value) for e in held), self._hold(held, math.inf, now))

    def hold_for_check(self, name: bytes, now: float) -> tuple[IndexEntry[V], Lease] | None:
        """A block whose bytes are in memory, and a lease for the reader that verifies them."""
        self.expire(now)
        entry = self._entries.get(name)
        if entry is None or not entry.ready:
            return None
        return entry, self._hold((entry,), math.inf, now)

    def remove_corrupt(self, entry: IndexEntry[V]) -> bool:
        """Remove a block whose bytes are wrong; returns whether it was still stored."""
        if self._entries.get(entry.name) is not entry:
            return False
        entry.ready = False
        self._remove(entry.name, RemovalReason.CORRUPT)
        self.counters.corrupt += 1
        return True

    def lease_cost(self, owner: bytes, now: float) -> int:
        """See ``LeaseTable.cost``."""
        self.expire(now)
        return self._entries.leases.cost(owner)

    def extend(self, lease: int, deadline: float, now: float) -> bool:
        """Move the end of a lease; false if it has ended."""
        self.expire(now)
        return self._entries.leases.extend(lease, deadline)

    def reserve(
        self, claims: Sequence[Claim], ttl: float, now: float, ticket: int | None = None
    ) -> Grant:
        """Reserve room for blocks that are neither stored nor being written.

        The reservations are under ``ticket`` if it is open, else under a new one.
        """
        self.expire(now)
        for claim in reversed(claims):
            if (entry := self._entries.get(claim.name)) is not None:
                self._entries.use(entry, now)
        if ticket is None or not self.reservations.is_open(ticket):
            ticket = self._serial = self._serial + 1
            self.reservations.open(ticket, now + ttl)
        verdicts = tuple(self._claim(claim, ticket) for claim in claims)
        ended = self.reservations.close_if_empty(ticket)
        return Grant(None if ended else ticket, now + ttl, verdicts)

    def borrow(self, ticket: int, names: Sequence[bytes], now: float) -> list[Borrowed[V]]:
        """Reserved blocks and their places, for a writer to ``commit`` or ``give_back``, once."""
        self.expire(now)
        return [self.reservations.borrow(ticket, name) for name in names]

    def free_place(self, place: V, size: int) -> None:
        """Give back a borrowed place."""
        if self._allocator is not None:
            self._allocator.give(place, size)

    def commit(
        self,
        ticket: int,
        name: bytes,
        value: V,
        now: float,
        parent: bytes | None = None,
        tokens: int = 0,
    ) -> bool:
        """Make a reserved block visible; false if the reservation has ended.

        The writer then still owns the value. ``parent`` is the block that this one continues.
        """
        self.expire(now)
        return self.publish(ticket, name, value, now, parent, tokens)

    def publish(
        self, ticket: int, name: bytes, value: V, now: float, parent: bytes | None, tokens: int
    ) -> bool:
        """``commit`` without ``expire``, which the caller has called for all blocks at once."""
        if (writing := self.reservations.take(ticket, name)) is None:
            return False
        claim = writing.claim
        if parent is not None and parent in self._entries:
            parent = self._entries[parent].name  # one copy of the name, not two
        entry = IndexEntry(claim, value, parent, tokens)
        self._entries.add(entry, now)
        self._entries.uncover(claim)
        self.counters.stored += 1
        self.counters.bytes_in += claim.size
        self._record_added(entry)
        return True

    def hint(self, hints: Sequence[Hint], now: float) -> None:
        """Take in advice on which blocks will be used soon, or late."""
        self.expire(now)
        for hint in hints:
            self._entries.policy.hint(hint, self._options.budget)

    def owner(self, serial: int) -> bytes | None:
        """The tenant prefix of a lease or ticket; ``None`` if it has ended."""
        held = self._entries.leases.blocks(serial)
        return prefix_of(held[0].name) if held else self.reservations.owner(serial)

    def abandon(self, ticket: int, names: Iterable[bytes] | None = None) -> None:
        """Give up the named reservations of a ticket, or all that remain."""
        for name in self.reservations.names(ticket) if names is None else names:
            if (writing := self.reservations.take(ticket, name)) is None:
                continue
            self._entries.uncover(writing.claim)
            self.counters.abandoned += 1
            if writing.place is not None:
                self.free_place(writing.place, writing.claim.size)

    def release(self, lease: int) -> None:
        """End a lease early; unknown leases have ended."""
        for entry in self._entries.release(lease):
            if not entry.io_count:
                self.free_place(entry.value, entry.size)

    def clear(self, now: float) -> int:
        """Remove every block that no lease holds; returns how many."""
        self.expire(now)
        idle = [name for name, entry in self._entries.items() if entry.leases == 0]
        for name in idle:
            self._remove(name, RemovalReason.CLEARED)
        self.counters.cleared += len(idle)
        return len(idle)

    def expire(self, now: float) -> None:
        """End the leases, reservations and partial blocks whose time is over."""
        self._entries.policy.advance(now)
        if self._entries.nothing_due(now) and self.reservations.ends.nothing_due(now):
            return
        for lease in self._entries.leases.ends.due(now):
            self.release(lease)
        for ticket in self.reservations.ends.due(now):
            self.abandon(ticket)
        for name in self._entries.expired_partials(now):
            self._remove(name, RemovalReason.EXPIRED)
            self.counters.expired += 1

    def find(self, name: bytes, now: float) -> IndexEntry[V] | None:
        """The block, without counting as a use."""
        self.expire(now)
        return self._entries.get(name)

    def entries(self, now: float) -> list[IndexEntry[V]]:
        """Every stored block, oldest first."""
        self.expire(now)
        return list(self._entries.values())

    def stats(self) -> StoreStats:
        """Content and a copy of the counters."""
        return StoreStats(
            self._options.boot,
            self._options.budget,
            len(self._entries),
            self._entries.bytes + self.reservations.bytes,
            self.reservations.bytes,
            self._entries.leased,
            len(self._entries.leases),
            len(self.reservations),
            dataclasses.replace(self.counters, **self._entries.policy.counts),
            eviction=self._entries.policy.name,
            overhead_bytes=self._entries.policy.overhead_bytes
            + self._entries.leases.overhead_bytes
            + self._tombstones.overhead_bytes
            + self.events.overhead_bytes,
        )

    def audit(self) -> list[str]:
        """Sums that do not agree; empty unless there is a bug."""
        most = max(self._entries.bytes + self.reservations.bytes, self._options.budget)
        sums = {**self._entries.sums(), "budget": (most, self._options.budget)}
        return [f"{what}: {one} is not {two}" for what, (one, two) in sums.items() if one != two]

    def _hold(self, entries: Iterable[IndexEntry[V]], deadline: float, now: float) -> Lease:
        self._serial += 1
        self._entries.hold(self._serial, tuple(entries), deadline, now)
        return Lease(self._serial, self._options.boot, deadline)

    def _claim(self, claim: Claim, ticket: int) -> PutStatus:
        if self._is_stored(claim.name):
            self.counters.existed += 1
            return PutStatus.EXISTED
        if claim.name in self.reservations or self.reservations.is_full(ticket, claim.size):
            self.counters.pending += 1
            return PutStatus.PENDING
        needed = claim.needed
        if needed and not (needed in self.reservations or self._is_stored(needed)):
            self.counters.orphaned += 1
            return PutStatus.NO_PARENT
        self._entries.cover(claim)
        writing = self._make_room(claim, ticket) if self.reservations.allows(claim) else None
        if writing is None:
            self._entries.uncover(claim)
            self.counters.rejected += 1
            return PutStatus.NO_ROOM
        self.reservations.add(writing)
        return PutStatus.RESERVED

    def _make_room(self, claim: Claim, ticket: int) -> Reservation[V] | None:
        """Evict until there is room, in bytes and in one piece; ``None`` if it is impossible."""
        entries, room, each = self._entries, self._allocator, self._options.entry_bytes
        # Room for stored blocks: the budget less this claim and all reservations.
        most = self._options.budget - claim.size - self.reservations.bytes
        most -= (len(self.reservations) + 1) * each
        if entries.leased + entries.leased_count * each > most:
            return None  # evicting every other block would not be enough
        while True:
            if entries.bytes + len(entries) * each <= most:
                place = None if room is None else room.take(claim.size)
                if place is not None or room is None:
                    return Reservation(ticket, claim, place)
            if not self._evict(claim):
                return None

    def _evict(self, claim: Claim) -> bool:
        victim = self._entries.policy.victim_for(claim)
        if victim is None:
            return False
        self._remove(victim.name, RemovalReason.EVICTED)
        self.counters.evicted += 1
        return True

    def _remove(self, name: bytes, reason: RemovalReason) -> None:
        entry = self._entries.remove(name)
        self._record_removed(entry, reason)
        if not entry.io_count and not entry.leases:  # else the last of them gives it back
            self.free_place(entry.value, entry.size)

    # Overridden by an index with a disk tier.
    def _lead(self, names: Sequence[bytes], held: bool) -> int:
        """How many lead without a gap; ``held``: counting only blocks that can be leased."""
        return next((i for i, name in enumerate(names) if name not in self._entries), len(names))

    def _sizes(self, names: Sequence[bytes]) -> tuple[int, ...]:
        return tuple(self._entries[name].size for name in names)

    def _is_stored(self, name: bytes) -> bool:
        return name in self._entries

    def _record_added(self, entry: IndexEntry[V]) -> None:
        self.events.add(entry)
        self._tombstones.added(entry.first_block_hash)

    def _record_removed(self, entry: IndexEntry[V], reason: RemovalReason) -> None:
        self.events.add(entry, reason)
        self._tombstones.removed(entry.name, entry.first_block_hash, MISS_REASONS[reason])
