"""Catalog and arena as one thing that many threads may use: what every face of the store calls.

A block's bytes are written into its place in the arena by one writer and checked there before they
become visible. Nothing here blocks for longer than the bookkeeping takes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvrelay.block.header import stated_length
from kvrelay.errors import Corrupt, Exhausted
from kvstore.base import LookupResult, Outcome, PutStatus, SurveyResult, Tail
from kvstore.claims import Claim, Grant, check_block, prefix_of
from kvstore.disk.locked_index import LockedIndex
from kvstore.disk.segment_index import SegmentIndex, entry_on_disk
from kvstore.disk.tiered_index import TieredIndex
from kvstore.index.block_index import BlockIndex, ChooseVictim, IndexOptions
from kvstore.index.entries import IndexEntry, Located
from kvstore.index.events import BlockEvent
from kvstore.index.eviction.policies import make_policy
from kvstore.index.eviction.policy import EvictionPolicy
from kvstore.index.eviction.victims import QuotaPolicy
from kvstore.limits import StoreLimits
from kvstore.server.arena import Arena, capacity_for
from kvstore.server.slot import WriteSlot
from kvstore.server.tenants import TenantQuota, TenantTable
from kvstore.stats import StoreStats

STORED, EXPIRED = Outcome(PutStatus.STORED), Outcome(PutStatus.EXPIRED)

ENTRY_BYTES = 480
"""Memory of one block besides its place, measured at a million blocks."""


class BlockStore:
    """Thread-safe. ``boot`` tells this start from every other."""

    def __init__(self, limits: StoreLimits, tenants: TenantTable | None = None) -> None:
        self.boot = os.urandom(16)
        self.limits = limits
        self.tenants = tenants or TenantTable()
        self.arena = Arena(self.boot, capacity_for(limits.budget))
        self._lock = threading.Lock()
        self._key = os.urandom(32)
        self._watchers: list[Callable[[], None]] = []
        self.disk_index: LockedIndex | None = None  # of the disk
        owners = self.tenants.owners
        eviction = limits.eviction
        quotas = {prefix: owner.quota for prefix, owner in owners.items()}
        self._quota_policy = QuotaPolicy(
            lambda: make_policy(eviction, len(owners)), quotas, ENTRY_BYTES
        )
        self._segments = None if limits.disk_budget is None else SegmentIndex(limits.disk_budget)
        self._index = self._make_index()

    def _make_index(self) -> BlockIndex[int]:
        limits = self.limits
        options = IndexOptions(
            limits.budget,
            limits.partial_life,
            self.boot,
            entry_bytes=ENTRY_BYTES,
            events=limits.events,
            shares=replace(limits.shares, owners=max(1, len(self.tenants.owners))),
        )
        policy: EvictionPolicy = make_policy(limits.eviction)
        choose: ChooseVictim | None = None
        if self.tenants.owners:
            policy = self._quota_policy
            choose = self._quota_policy.victim_for
        if self._segments is None:
            return BlockIndex(options, policy, self.arena, choose)
        tiered = TieredIndex(options, policy, self.arena, self._segments, choose)
        self.disk_index = LockedIndex(tiered, self._lock, self._notify)
        return tiered

    def _notify(self) -> None:
        for changed in self._watchers:
            changed()

    def watch(self, changed: Callable[[], None]) -> None:
        """``changed`` is called, in any thread, when reservations have ended or blocks came up."""
        self._watchers.append(changed)

    def token(self, serial: int) -> bytes:
        """What only those can know who were given the lease or ticket ``serial`` by this start."""
        return hashlib.blake2b(serial.to_bytes(8, "little"), key=self._key, digest_size=16).digest()

    def knows(self, serial: int, token: bytes) -> bool:
        """Whether ``token`` is that of ``serial``; in constant time."""
        return hmac.compare_digest(self.token(serial), token)

    def lookup(
        self,
        names: Sequence[bytes],
        tails: Sequence[Tail],
        ttl: float,
        openings: Sequence[int] = (),
    ) -> LookupResult:
        """See ``BlockIndex.lookup``."""
        with self._lock:
            self._may_hold([*names[:1], *(tail.name for tail in tails)], len(names), ttl)
            held = self._index.lookup(names, tails, ttl, time.monotonic(), openings)
            self._wake()
            return held

    def survey(
        self, names: Sequence[bytes], ttl: float, openings: Sequence[int] = ()
    ) -> SurveyResult:
        """See ``BlockIndex.survey``."""
        with self._lock:
            self._may_hold(names, len(names), ttl)
            seen = self._index.survey(names, ttl, time.monotonic(), openings)
            self._wake()
            return seen

    def locate(self, names: Sequence[bytes], ttl: float) -> Located[int]:
        """See ``BlockIndex.locate``; the values are offsets in the arena."""
        with self._lock:
            self._may_hold(names, len(names), ttl)
            return self._index.locate(names, ttl, time.monotonic())

    @contextmanager
    def lent(self, lease: int, first: int, count: int) -> Iterator[list[memoryview] | None]:
        """The bytes of blocks a lease holds, ``None`` once it has ended.

        They stay what they are until they are given back, though the lease may end before: what
        is being sent must not become another block, which may be another tenant's.
        """
        with self._lock:
            lent = self._index.lend(lease, first, count, time.monotonic())
        if lent.lease is None:
            yield None
            return
        try:
            there = (block for block in lent.blocks if block is not None)
            yield [self.arena.view(place, size).toreadonly() for size, place in there]
        finally:
            self.release([lent.lease.id])

    def recheck(self, name: bytes) -> Corrupt | None:
        """Look at a block in memory, and take it out if it is wrong; what is wrong. Reads all.

        It is held meanwhile; for other leases too it stays where it is until they end.
        """
        with self._lock:
            found = self._index.examine(name, time.monotonic())
        if found is None:
            return None
        entry, lease = found
        try:
            view = self.arena.view(entry.value, entry.size).toreadonly()
            check_block(Claim(name, entry.size, entry.partial), view)
        except Corrupt as error:
            with self._lock:
                return error if self._index.condemn(entry) else None
        finally:
            self.release([lease.id])
        return None

    def extend(self, lease: int, seconds: float) -> bool:
        """See ``BlockIndex.extend``."""
        now = time.monotonic()
        with self._lock:
            return self._index.extend(lease, now + seconds, now)

    def release(self, leases: Iterable[int], owner: bytes | None = None) -> None:
        """See ``BlockIndex.release``; with ``owner`` those of this tenant only."""
        with self._lock:
            for lease in leases:
                if owner is None or self._index.owner(lease) == owner:
                    self._index.release(lease)

    def owner(self, ticket: int) -> bytes | None:
        """See ``BlockIndex.owner``."""
        with self._lock:
            return self._index.owner(ticket)

    def usage(self) -> list[tuple[TenantQuota, int, int]]:
        """Blocks and bytes in memory of each tenant; those that are not known have no quota."""
        with self._lock:
            known = self.tenants.owners
            found = {
                p: self._quota_policy.used(p) for p in {*known, *self._quota_policy.prefixes()}
            }
        return [
            (known.get(prefix) or TenantQuota(prefix.hex(), prefix, 0), *used)
            for prefix, used in sorted(found.items())
        ]

    def reserve(self, claims: Sequence[Claim], ticket: int | None = None) -> Grant:
        """See ``BlockIndex.reserve``."""
        life = self.limits.ticket_life
        with self._lock:
            return self._index.reserve(claims, life, time.monotonic(), ticket)

    def reserved(self, ticket: int, name: bytes) -> Claim | None:
        """See ``BlockIndex.reserved``."""
        with self._lock:
            return self._index.reserved(ticket, name)

    def prolong(self, ticket: int) -> None:
        """The writer makes progress."""
        with self._lock:
            self._index.prolong(ticket, time.monotonic() + self.limits.ticket_life)

    def abandon(self, ticket: int) -> None:
        """Give up what is left of a ticket, and tell those who wait."""
        with self._lock:
            self._index.abandon(ticket)
        self._notify()

    def all_pending(self, claims: Sequence[Claim]) -> bool:
        """Whether each is being written by somebody."""
        with self._lock:
            self._index.expire(time.monotonic())
            return all(self._index.is_being_written(claim.name) for claim in claims)

    def slots(self, ticket: int, names: Sequence[bytes]) -> list[WriteSlot | None]:
        """Where to write reserved blocks, ``None`` for those whose reservation has run out.

        ``settle`` must follow, whatever happens.
        """
        with self._lock:
            lent = self._index.borrow(ticket, names, time.monotonic())
        return [
            None if one is None else WriteSlot(ticket, *one, self.arena.view(one[1], one[0].size))
            for one in lent
        ]

    def settle(self, slots: Sequence[WriteSlot | None]) -> list[Outcome]:
        """Make the blocks that are right visible; other slots are given back. At once for all."""
        now = time.monotonic()
        with self._lock:
            self._index.expire(now)
            outcomes = [EXPIRED if slot is None else self._settle(slot, now) for slot in slots]
            self._wake()
        return outcomes

    def stats(self) -> StoreStats:
        """A reading."""
        with self._lock:
            self._index.expire(time.monotonic())
            return self._index.stats()

    def clear(self) -> int:
        """Remove every block that no lease holds; how many."""
        with self._lock:
            return self._index.clear(time.monotonic())

    def snapshot(self) -> tuple[int, list[IndexEntry[int]]]:
        """The number of the last event, and every block there is after it.

        Of a block all but the number of leases stays as it is, so this may be read at leisure.
        """
        with self._lock:
            entries = self._index.entries(time.monotonic())
            below = [] if self._segments is None else self._segments.locations()
            last = self._index.events.last
        if below:
            above = {entry.name for entry in entries}
            entries += [entry_on_disk(location) for location in below if location.name not in above]
        return last, entries

    def events(self, after: int, limit: int) -> list[BlockEvent[int]] | None:
        """See ``Events.after``."""
        with self._lock:
            self._index.expire(time.monotonic())
            return self._index.events.after(after, limit)

    def inspect(self, name: bytes) -> tuple[IndexEntry[int], bytes] | None:
        """A block and the bytes of its header; none of one that lies on disk only."""
        with self._lock:
            if (entry := self._index.find(name, time.monotonic())) is None:
                return None
            data = self.arena.view(entry.value, entry.size) if entry.ready else memoryview(b"")
            return entry, bytes(data[: stated_length(data)])

    def on_disk(self, name: bytes) -> bool:
        """Whether the block lies there."""
        return self.disk_index is not None and self.disk_index.has(name)

    def _may_hold(self, names: Sequence[bytes], count: int, ttl: float) -> None:
        """Leases are memory too, which no budget counts: ``Exhausted`` when a tenant has many."""
        if ttl <= 0 or not names:
            return
        load = self._index.held_by(prefix_of(names[0]), time.monotonic())
        most = self.limits.leased
        if load + count > most:
            raise Exhausted(
                f"leases hold {load} blocks and {count} more are over {most}: give some back", 1.0
            )

    def _wake(self) -> None:
        if self.disk_index is not None:
            self.disk_index.wake()

    def _settle(self, slot: WriteSlot, now: float) -> Outcome:
        claim, found = slot.claim, slot.found
        if found is not None:
            parent = prefix_of(claim.name) + found.parent
            if self._index.publish(
                slot.ticket, claim.name, slot.place, now, parent, found.positions
            ):
                return STORED
        else:
            self._index.counters.corrupt += slot.reason is not None
            self._index.abandon(slot.ticket, [claim.name])
        self._index.give_back(slot.place, claim.size)
        return EXPIRED if slot.reason is None else Outcome(PutStatus.CORRUPT, slot.reason)
