"""``memory://NAME``: a store within this process, for tests and use by a single process.

Stores of one name share their blocks, as clients of one service do.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from kvrelay.block.name import Digest, sha256
from kvrelay.errors import Corrupt
from kvstore.base import (
    NOT_SENT,
    Block,
    GetResult,
    Lease,
    LookupResult,
    Offer,
    Outcome,
    PutStatus,
    SurveyResult,
    Want,
    claim_of,
)
from kvstore.check import check_block
from kvstore.claims import Claim, ClaimStatus, Tail
from kvstore.index.block_index import BlockIndex
from kvstore.index.eviction.policies import EVICTIONS, make_policy
from kvstore.limits import BUDGET, PARTIAL_LIFE, TICKET_LIFE
from kvstore.stats import StoreStats


@dataclass(slots=True)
class _Shelf:
    """The state that stores of one name share; ``changed`` guards it."""

    boot: bytes
    catalog: BlockIndex[bytes]
    changed: threading.Condition = field(default_factory=threading.Condition)


_SHELVES: dict[str, _Shelf] = {}
_SHELVES_LOCK = threading.Lock()


def _shelf(name: str, budget: int) -> _Shelf:
    with _SHELVES_LOCK:
        if name not in _SHELVES:
            boot = os.urandom(16)
            catalog: BlockIndex[bytes] = BlockIndex(
                budget, make_policy(EVICTIONS[0]), PARTIAL_LIFE, boot
            )
            _SHELVES[name] = _Shelf(boot, catalog)
        return _SHELVES[name]


def forget(name: str) -> None:
    """Drop the blocks of ``memory://NAME``; a store connected later starts empty."""
    with _SHELVES_LOCK:
        _SHELVES.pop(name, None)


class MemoryStore:
    """A ``Store``. ``budget`` counts for the first store of a name.

    ``digest`` names blocks; tests pass another one than the default.
    """

    def __init__(self, name: str, budget: int = BUDGET, digest: Digest = sha256) -> None:
        self.url = f"memory://{name}"
        self._digest = digest
        self._shelf = _shelf(name, budget)

    def lookup(
        self,
        names: Sequence[bytes],
        tails: Sequence[Tail],
        ttl: float,
        timeout: float,
        openings: Sequence[int] = (),
    ) -> LookupResult:
        with self._shelf.changed:
            held = self._shelf.catalog.lookup(names, tails, ttl, time.monotonic(), openings)
        lease = self._lease(held.lease, held.deadline)
        return LookupResult(
            held.lead, held.tail, held.sizes, lease, missing=held.missing, boot=self._shelf.boot
        )

    def survey(
        self, names: Sequence[bytes], ttl: float, timeout: float, openings: Sequence[int] = ()
    ) -> SurveyResult:
        with self._shelf.changed:
            seen = self._shelf.catalog.survey(names, ttl, time.monotonic(), openings)
        lease = self._lease(seen.lease, seen.deadline)
        return SurveyResult(seen.sizes, lease, seen.misses, seen.opening)

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        for index, want in enumerate(wants):
            with self._shelf.changed:
                data = self._shelf.catalog.get(want.name, time.monotonic())
            if data is None or len(data) < len(want.buffer):
                yield GetResult(index, None)
                continue
            split = len(data) - len(want.buffer)
            want.buffer[:] = memoryview(data)[split:]
            try:
                yield GetResult(index, data[:split])
            except GeneratorExit:
                self._recheck(want.name)
                raise

    def put(self, offers: Sequence[Offer], timeout: float) -> list[Outcome]:
        deadline = time.monotonic() + timeout
        claims = [claim_of(offer) for offer in offers]
        with self._shelf.changed:
            grant = self._shelf.catalog.reserve(claims, TICKET_LIFE, time.monotonic())
        outcomes: list[Outcome] = []
        try:
            for claim, offer, verdict in zip(claims, offers, grant.verdicts, strict=True):
                if verdict is ClaimStatus.RESERVED and grant.ticket is not None:
                    outcomes.append(self._write(grant.ticket, claim, offer.read().seal()))
                else:
                    outcomes.append(Outcome(NOT_SENT[verdict]))
        finally:
            self._abandon(grant.ticket)
        return self._wait_for_others(offers, outcomes, deadline)

    def release(self, leases: Sequence[Lease], timeout: float) -> None:
        with self._shelf.changed:
            for lease in leases:
                if lease.boot == self._shelf.boot:
                    self._shelf.catalog.release(lease.id)

    def stats(self, timeout: float) -> StoreStats:
        with self._shelf.changed:
            self._shelf.catalog.expire(time.monotonic())
            return self._shelf.catalog.stats()

    def clear(self, timeout: float) -> int:
        with self._shelf.changed:
            return self._shelf.catalog.clear(time.monotonic())

    def close(self) -> None:
        """Nothing: the blocks stay for the other stores of this name."""

    def _lease(self, serial: int | None, deadline: float) -> Lease | None:
        return None if serial is None else Lease(serial, self._shelf.boot, deadline)

    def _write(self, ticket: int, claim: Claim, block: Block) -> Outcome:
        data = b"".join((block.header, block.payload))
        try:
            header = check_block(claim, data, self._digest)
        except Corrupt as error:
            with self._shelf.changed:
                self._shelf.catalog.tally.corrupt += 1
            return Outcome(PutStatus.CORRUPT, str(error))
        with self._shelf.changed:
            stored = self._shelf.catalog.commit(
                ticket, claim.name, data, time.monotonic(), header.parent, header.positions
            )
        return Outcome(PutStatus.STORED if stored else PutStatus.EXPIRED)

    def _recheck(self, name: bytes) -> None:
        """A reader stopped at this block: remove it if it is wrong."""
        with self._shelf.changed:
            entry = self._shelf.catalog.find(name, time.monotonic())
        if entry is None:
            return
        try:
            check_block(Claim(name, entry.size, entry.partial), entry.value, self._digest)
        except Corrupt:
            with self._shelf.changed:
                self._shelf.catalog.condemn(entry)

    def _abandon(self, ticket: int | None) -> None:
        with self._shelf.changed:
            if ticket is not None:
                self._shelf.catalog.abandon(ticket)
            self._shelf.changed.notify_all()

    def _wait_for_others(
        self, offers: Sequence[Offer], outcomes: list[Outcome], deadline: float
    ) -> list[Outcome]:
        """Put again the blocks that another writer was putting, after a change."""
        late = [i for i, outcome in enumerate(outcomes) if outcome.kept is PutStatus.PENDING]
        remaining = deadline - time.monotonic()
        if not late or remaining <= 0:
            return outcomes
        with self._shelf.changed:
            self._shelf.changed.wait_for(lambda: self._settled(offers[late[0]].name), remaining)
        again = self.put([offers[i] for i in late], deadline - time.monotonic())
        for i, outcome in zip(late, again, strict=True):
            outcomes[i] = outcome
        return outcomes

    def _settled(self, name: bytes) -> bool:
        self._shelf.catalog.expire(time.monotonic())
        return not self._shelf.catalog.is_being_written(name)
