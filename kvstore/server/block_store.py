"""The block store: index and arena behind one lock, used by every transport.

A block's bytes are written into its place in the arena by one writer and checked there before they
become visible. No method blocks for longer than the bookkeeping takes, but ``recheck``, which reads
a block.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvrelay.block.header import stated_length
from kvrelay.block.mac import BlockKey
from kvrelay.block.verify import verify_tag
from kvrelay.errors import Corrupt, Exhausted
from kvstore.base import LookupResult, Outcome, PutStatus, SurveyResult, Tail
from kvstore.claims import Claim, Grant, check_block, prefix_of
from kvstore.disk.locked_index import LockedIndex
from kvstore.disk.segment_index import SegmentIndex, entry_on_disk
from kvstore.disk.tiered_index import TieredIndex
from kvstore.index.block_index import BlockIndex, IndexOptions
from kvstore.index.entries import IndexEntry, Located
from kvstore.index.events import EVENT_BYTES, BlockEvent
from kvstore.index.eviction import make_policy
from kvstore.index.eviction.expected_returns import GHOSTS
from kvstore.index.eviction.ghosts import GHOST_BYTES
from kvstore.index.eviction.hints import Hint
from kvstore.index.eviction.policy import EvictionPolicy
from kvstore.index.eviction.shadow_lru import NAME_BYTES, NAMES
from kvstore.index.eviction.victims import QuotaPolicy
from kvstore.index.tombstones import MAX_TOMBSTONES, TOMBSTONE_BYTES
from kvstore.limits import HINTED_SHARE, RETURNS, TENANT_HINTED_SHARE, StoreLimits
from kvstore.server.arena import Arena, capacity_for
from kvstore.server.slot import WriteSlot
from kvstore.server.tenants import TenantQuota, TenantTable
from kvstore.stats import StoreStats, TenantStats

log = logging.getLogger("kvrelay.store")

STORED, EXPIRED = Outcome(PutStatus.STORED), Outcome(PutStatus.EXPIRED)

ENTRY_BYTES = 480
"""Memory of one block besides its place, measured with a million blocks."""


def most_overhead(limits: StoreLimits) -> int:
    """Bytes of bookkeeping on top of the budget in a full store, without leases and the disk.

    Stores of more than a quarter of a million blocks need more for the eviction policy.
    """
    policy = GHOST_BYTES * GHOSTS + NAME_BYTES * NAMES if limits.eviction == RETURNS else 0
    return policy + TOMBSTONE_BYTES * MAX_TOMBSTONES + EVENT_BYTES * limits.events


class BlockStore:
    """Thread-safe. ``boot`` tells this start of the store from every other."""

    def __init__(
        self,
        limits: StoreLimits,
        tenants: TenantTable | None = None,
        block_key: BlockKey | None = None,
    ) -> None:
        """``block_key``: the fleet's key; ``recheck`` checks tags for readers that have it."""
        self._block_key = block_key
        self.boot = os.urandom(16)
        self.limits = limits
        self.tenants = tenants or TenantTable()
        self.arena = Arena(self.boot, capacity_for(limits.budget))
        self._lock = threading.Lock()
        self._key = os.urandom(32)
        self._listeners: list[Callable[[], None]] = []
        self.disk_index: LockedIndex | None = None
        owners = self.tenants.owners
        eviction = limits.eviction
        quotas = {prefix: owner.quota for prefix, owner in owners.items()}
        self._quota_policy: QuotaPolicy[int] = QuotaPolicy(
            lambda: make_policy(eviction, len(owners)), quotas, ENTRY_BYTES, _report
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
        policy: EvictionPolicy | QuotaPolicy[int] = make_policy(limits.eviction)
        if self.tenants.owners:
            policy = self._quota_policy
        if self._segments is None:
            return BlockIndex(options, policy, self.arena, _report)
        tiered = TieredIndex(options, policy, self.arena, self._segments, _report)
        self.disk_index = LockedIndex(tiered, self._lock, self._notify)
        return tiered

    def _notify(self) -> None:
        for notify in self._listeners:
            notify()

    def on_change(self, notify: Callable[[], None]) -> None:
        """Call ``notify``, in any thread, when reservations end or blocks arrive from disk."""
        self._listeners.append(notify)

    def proof(self, serial: int) -> bytes:
        """A secret known only to the client that got lease or ticket ``serial`` from this start."""
        return hashlib.blake2b(serial.to_bytes(8, "little"), key=self._key, digest_size=16).digest()

    def check_proof(self, serial: int, proof: bytes) -> bool:
        """Whether ``proof`` is that of ``serial``; in constant time."""
        return hmac.compare_digest(self.proof(serial), proof)

    def lookup(
        self,
        names: Sequence[bytes],
        tails: Sequence[Tail],
        ttl: float,
        first_block_hashes: Sequence[int] = (),
    ) -> LookupResult:
        """See ``BlockIndex.lookup``."""
        with self._lock:
            self._check_lease_limit([*names[:1], *(tail.name for tail in tails)], len(names), ttl)
            held = self._index.lookup(names, tails, ttl, time.monotonic(), first_block_hashes)
            self._wake_disk()
            return held

    def survey(
        self, names: Sequence[bytes], ttl: float, first_block_hashes: Sequence[int] = ()
    ) -> SurveyResult:
        """See ``BlockIndex.survey``."""
        with self._lock:
            self._check_lease_limit(names, len(names), ttl)
            seen = self._index.survey(names, ttl, time.monotonic(), first_block_hashes)
            self._wake_disk()
            return seen

    def locate(self, names: Sequence[bytes], ttl: float) -> Located[int]:
        """See ``BlockIndex.locate``; the values are offsets in the arena."""
        with self._lock:
            self._check_lease_limit(names, len(names), ttl)
            return self._index.locate(names, ttl, time.monotonic())

    @contextmanager
    def lend(self, lease: int, first: int, count: int) -> Iterator[list[memoryview] | None]:
        """The bytes of blocks that a lease holds, ``None`` if it has ended.

        They do not change before the context ends, even if the lease ends earlier: bytes that are
        being sent must not become those of another block, perhaps of another tenant.
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

    def recheck(self, name: bytes, proof: bytes = b"") -> Corrupt | None:
        """Verify a block in memory and remove it if it is corrupt; returns what is wrong.

        The block is held meanwhile. Its place is reused only when the last lease on it has ended.
        ``proof`` shows that its reader has our fleet's key (``BlockKey.proof``): then a block that
        our fleet did not sign occupies its name. Right blocks of other fleets stay.
        """
        with self._lock:
            found = self._index.hold_for_check(name, time.monotonic())
        if found is None:
            return None
        entry, lease = found
        try:
            view = self.arena.view(entry.value, entry.size).toreadonly()
            header = check_block(Claim(name, entry.size, entry.partial), view)
            if self._block_key is not None and _proves(proof, name, self._block_key):
                split = header.length
                verify_tag(bytes(view[:split]), view[split:], self._block_key)
        except Corrupt as error:
            with self._lock:
                return error if self._index.remove_corrupt(entry) else None
        finally:
            self.release([lease.id])
        return None

    def hint(self, hints: Sequence[Hint]) -> None:
        """See ``BlockIndex.hint``."""
        with self._lock:
            self._index.hint(hints, time.monotonic())

    def hinted_bytes(self, tenant: str) -> int:
        """How many bytes of the services' blocks the hints for a tenant of the router may keep."""
        owners = self.tenants.owners
        whole = owners[b""].quota if b"" in owners else self.limits.budget
        for owner in owners.values():
            if tenant and owner.name == tenant:
                return owner.quota
        return int(whole * (TENANT_HINTED_SHARE if tenant else HINTED_SHARE))

    def extend(self, lease: int, seconds: float) -> bool:
        """See ``BlockIndex.extend``."""
        now = time.monotonic()
        with self._lock:
            return self._index.extend(lease, now + seconds, now)

    def release(self, leases: Iterable[int], owner: bytes | None = None) -> None:
        """See ``BlockIndex.release``; with ``owner`` only leases of this tenant."""
        with self._lock:
            for lease in leases:
                if owner is None or self._index.owner(lease) == owner:
                    self._index.release(lease)

    def owner(self, ticket: int) -> bytes | None:
        """See ``BlockIndex.owner``."""
        with self._lock:
            return self._index.owner(ticket)

    def usage(self) -> list[tuple[TenantQuota, int, int]]:
        """Blocks and bytes in memory of each tenant; a tenant without credentials has no quota."""
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

    def reserved_claim(self, ticket: int, name: bytes) -> Claim | None:
        """The claim of a reservation; ``None`` if it has ended."""
        with self._lock:
            found = self._index.reservations.find(ticket, name)
            return None if found is None else found.claim

    def extend_ticket(self, ticket: int) -> None:
        """The writer makes progress: its ticket ends later."""
        with self._lock:
            self._index.reservations.extend_ticket(
                ticket, time.monotonic() + self.limits.ticket_life
            )

    def abandon(self, ticket: int) -> None:
        """Give up the remaining reservations of a ticket and notify waiters."""
        with self._lock:
            self._index.abandon(ticket)
        self._notify()

    def all_pending(self, claims: Sequence[Claim]) -> bool:
        """Whether every claimed block is being written."""
        with self._lock:
            self._index.expire(time.monotonic())
            return all(claim.name in self._index.reservations for claim in claims)

    def slots(self, ticket: int, names: Sequence[bytes]) -> list[WriteSlot | None]:
        """Slots for reserved blocks, ``None`` for each block whose reservation has ended.

        ``settle`` must follow, also after an error.
        """
        with self._lock:
            borrowed = self._index.borrow(ticket, names, time.monotonic())
        return [
            None if one is None else WriteSlot(ticket, *one, self.arena.view(one[1], one[0].size))
            for one in borrowed
        ]

    def settle(self, slots: Sequence[WriteSlot | None]) -> list[Outcome]:
        """Make the verified blocks visible and give the other slots back, under one lock."""
        now = time.monotonic()
        with self._lock:
            self._index.expire(now)
            outcomes = [EXPIRED if slot is None else self._settle(slot, now) for slot in slots]
            self._wake_disk()
        return outcomes

    def stats(self) -> StoreStats:
        """Read content and counters."""
        with self._lock:
            self._index.expire(time.monotonic())
            return self._index.stats()

    def tenant_stats(self) -> tuple[TenantStats, ...]:
        """A row for each tenant; none where no tenants are known."""
        if not self.tenants.owners:
            return ()
        return tuple(TenantStats(owner.name, owner.quota, *used) for owner, *used in self.usage())

    def stats_of_tenants(self) -> StoreStats:
        """``stats`` with a row for each tenant."""
        return replace(self.stats(), tenants=self.tenant_stats())

    def clear(self) -> int:
        """Remove every block that no lease holds; returns how many."""
        with self._lock:
            return self._index.clear(time.monotonic())

    def snapshot(self) -> tuple[int, list[IndexEntry[int]]]:
        """The number of the last event, and every block that is stored after it.

        Only the number of leases of an entry changes later, so the list may be read without a lock.
        """
        with self._lock:
            entries = self._index.entries(time.monotonic())
            on_disk = [] if self._segments is None else self._segments.locations()
            last = self._index.events.last
        if on_disk:
            in_memory = {entry.name for entry in entries}
            entries += [
                entry_on_disk(location) for location in on_disk if location.name not in in_memory
            ]
        return last, entries

    def events(self, after: int, limit: int) -> list[BlockEvent[int]] | None:
        """See ``EventLog.after``."""
        with self._lock:
            self._index.expire(time.monotonic())
            return self._index.events.after(after, limit)

    def inspect(self, name: bytes) -> tuple[IndexEntry[int], bytes] | None:
        """A block and the bytes of its header, which are empty if the block is on disk only."""
        with self._lock:
            if (entry := self._index.find(name, time.monotonic())) is None:
                return None
            data = self.arena.view(entry.value, entry.size) if entry.ready else memoryview(b"")
            return entry, bytes(data[: stated_length(data)])

    def on_disk(self, name: bytes) -> bool:
        """Whether the block is on disk."""
        return self._segments is not None and name in self._segments

    def _check_lease_limit(self, names: Sequence[bytes], count: int, ttl: float) -> None:
        """``Exhausted`` if a tenant has too many leases: they take memory that no budget counts."""
        if ttl <= 0 or not names:
            return
        cost = self._index.lease_cost(prefix_of(names[0]), time.monotonic())
        most = self.limits.leased
        if cost + count > most:
            raise Exhausted(
                f"leases hold {cost} blocks and {count} more are over {most}: give some back", 1.0
            )

    def _wake_disk(self) -> None:
        if self.disk_index is not None:
            self.disk_index.wake()

    def _settle(self, slot: WriteSlot, now: float) -> Outcome:
        claim, header = slot.claim, slot.header
        if header is not None:
            parent = prefix_of(claim.name) + header.parent
            if self._index.publish(
                slot.ticket, claim.name, slot.place, now, parent, header.positions
            ):
                return STORED
        else:
            self._index.counters.corrupt += slot.reason is not None
            self._index.abandon(slot.ticket, [claim.name])
        self._index.free_place(slot.place, claim.size)
        return EXPIRED if slot.reason is None else Outcome(PutStatus.CORRUPT, slot.reason)


def _proves(proof: bytes, name: bytes, key: BlockKey) -> bool:
    """Whether a reader with the fleet's key refuses a block of services; no other is signed."""
    return not prefix_of(name) and hmac.compare_digest(proof, key.proof(name))


def _report(error: Exception) -> None:
    log.error("eviction: the policy failed; LRU decides until the next start", exc_info=error)
