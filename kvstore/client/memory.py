"""``memory://NAME``: a store within this process, for tests and one-process use.

All stores of one name share their blocks, as clients of one service would.
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
    Block,
    GetResult,
    Lease,
    LookupResult,
    Offer,
    Outcome,
    PutStatus,
    SurveyResult,
    Tail,
    Want,
)
from kvstore.claims import Claim, check_block, claim_of
from kvstore.index.block_index import BlockIndex, IndexOptions
from kvstore.index.eviction import make_policy
from kvstore.limits import BUDGET, EVICTIONS, PARTIAL_LIFE, TICKET_LIFE
from kvstore.stats import StoreStats


@dataclass(slots=True)
class _Shelf:
    """What the stores of one name share; ``changed`` guards it."""

    boot: bytes
    index: BlockIndex[bytes]
    changed: threading.Condition = field(default_factory=threading.Condition)


_SHELVES: dict[str, _Shelf] = {}
_SHELVES_LOCK = threading.Lock()


def _shelf(name: str, budget: int) -> _Shelf:
    with _SHELVES_LOCK:
        if name not in _SHELVES:
            boot = os.urandom(16)
            index: BlockIndex[bytes] = BlockIndex(
                IndexOptions(budget, PARTIAL_LIFE, boot), make_policy(EVICTIONS[0])
            )
            _SHELVES[name] = _Shelf(boot, index)
        return _SHELVES[name]


def forget(name: str) -> None:
    """Drop the blocks of ``memory://NAME``; a store connected later starts empty."""
    with _SHELVES_LOCK:
        _SHELVES.pop(name, None)


class MemoryStore:
    """A ``Store``. ``budget`` counts for the first store of a name.

    ``digest`` is what blocks are named with; another one than the default is for tests.
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
        """As the protocol says."""
        with self._shelf.changed:
            return self._shelf.index.lookup(names, tails, ttl, time.monotonic(), openings)

    def survey(
        self, names: Sequence[bytes], ttl: float, timeout: float, openings: Sequence[int] = ()
    ) -> SurveyResult:
        """As the protocol says."""
        with self._shelf.changed:
            return self._shelf.index.survey(names, ttl, time.monotonic(), openings)

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        """As the protocol says."""
        for index, want in enumerate(wants):
            with self._shelf.changed:
                data = self._shelf.index.get(want.name, time.monotonic())
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
        """As the protocol says."""
        deadline = time.monotonic() + timeout
        claims = [claim_of(offer) for offer in offers]
        with self._shelf.changed:
            grant = self._shelf.index.reserve(claims, TICKET_LIFE, time.monotonic())
        outcomes: list[Outcome] = []
        try:
            for claim, offer, verdict in zip(claims, offers, grant.verdicts, strict=True):
                if verdict is PutStatus.RESERVED and grant.ticket is not None:
                    outcomes.append(self._write(grant.ticket, claim, offer.read().seal()))
                else:
                    outcomes.append(Outcome(verdict))
        finally:
            self._abandon(grant.ticket)
        return self._wait_for_others(offers, outcomes, deadline)

    def release(self, leases: Sequence[Lease], timeout: float) -> None:
        """As the protocol says."""
        with self._shelf.changed:
            for lease in leases:
                if lease.boot == self._shelf.boot:
                    self._shelf.index.release(lease.id)

    def stats(self, timeout: float) -> StoreStats:
        """As the protocol says."""
        with self._shelf.changed:
            self._shelf.index.expire(time.monotonic())
            return self._shelf.index.stats()

    def clear(self, timeout: float) -> int:
        """As the protocol says."""
        with self._shelf.changed:
            return self._shelf.index.clear(time.monotonic())

    def close(self) -> None:
        """As the protocol says."""

    def _write(self, ticket: int, claim: Claim, block: Block) -> Outcome:
        data = b"".join((block.header, block.payload))
        try:
            header = check_block(claim, data, self._digest)
        except Corrupt as error:
            with self._shelf.changed:
                self._shelf.index.counters.corrupt += 1
            return Outcome(PutStatus.CORRUPT, str(error))
        with self._shelf.changed:
            stored = self._shelf.index.commit(
                ticket, claim.name, data, time.monotonic(), header.parent, header.positions
            )
        return Outcome(PutStatus.STORED if stored else PutStatus.EXPIRED)

    def _recheck(self, name: bytes) -> None:
        """A reader left at this block. If it is wrong it goes, and may be put anew."""
        with self._shelf.changed:
            entry = self._shelf.index.find(name, time.monotonic())
        if entry is None:
            return
        try:
            check_block(Claim(name, entry.size, entry.partial), entry.value, self._digest)
        except Corrupt:
            with self._shelf.changed:
                self._shelf.index.remove_corrupt(entry)

    def _abandon(self, ticket: int | None) -> None:
        with self._shelf.changed:
            if ticket is not None:
                self._shelf.index.abandon(ticket)
            self._shelf.changed.notify_all()

    def _wait_for_others(
        self, offers: Sequence[Offer], outcomes: list[Outcome], deadline: float
    ) -> list[Outcome]:
        """Put again what another writer was at, once something has changed."""
        late = [i for i, outcome in enumerate(outcomes) if outcome.status is PutStatus.PENDING]
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
        self._shelf.index.expire(time.monotonic())
        return not self._shelf.index.is_being_written(name)
