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
    Block,
    GetResult,
    Lease,
    LookupResult,
    NameQuery,
    Offer,
    Outcome,
    PutStatus,
    SurveyResult,
    Want,
)
from kvstore.claims import Claim, check_block, claim_of
from kvstore.index.block_index import BlockIndex, IndexOptions
from kvstore.index.eviction import make_policy
from kvstore.limits import BUDGET, EVICTIONS, PARTIAL_LIFE, TICKET_LIFE
from kvstore.stats import StoreStats


@dataclass(slots=True)
class _SharedState:
    """The state that stores of one name share; ``changed`` guards it."""

    boot: bytes
    index: BlockIndex[bytes]
    changed: threading.Condition = field(default_factory=threading.Condition)


_SHARED: dict[str, _SharedState] = {}
_SHARED_LOCK = threading.Lock()


def _shared_state(name: str, budget: int) -> _SharedState:
    with _SHARED_LOCK:
        if name not in _SHARED:
            boot = os.urandom(16)
            index: BlockIndex[bytes] = BlockIndex(
                IndexOptions(budget, PARTIAL_LIFE, boot), make_policy(EVICTIONS[0])
            )
            _SHARED[name] = _SharedState(boot, index)
        return _SHARED[name]


def forget(name: str) -> None:
    """Drop the blocks of ``memory://NAME``; a store connected later starts empty."""
    with _SHARED_LOCK:
        _SHARED.pop(name, None)


class MemoryStore:
    """A ``Store``. ``budget`` counts for the first store of a name.

    ``digest`` names blocks; tests pass another one than the default.
    """

    def __init__(self, name: str, budget: int = BUDGET, digest: Digest = sha256) -> None:
        self.url = f"memory://{name}"
        self._digest = digest
        self._shared = _shared_state(name, budget)

    def lookup(self, query: NameQuery, timeout: float) -> LookupResult:
        with self._shared.changed:
            return self._shared.index.lookup(
                query.names, query.tails, query.ttl, time.monotonic(), query.first_block_hashes
            )

    def survey(self, query: NameQuery, timeout: float) -> SurveyResult:
        with self._shared.changed:
            return self._shared.index.survey(
                query.names, query.ttl, time.monotonic(), query.first_block_hashes
            )

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        for index, want in enumerate(wants):
            with self._shared.changed:
                data = self._shared.index.get(want.name, time.monotonic())
            if data is None:
                yield GetResult(index, None)
                continue
            split = max(len(data) - len(want.buffer), 0)
            if split:
                want.buffer[:] = memoryview(data)[split:]
            try:
                yield GetResult(index, data[:split])
            except GeneratorExit:
                self._recheck(want.name)
                raise

    def put(self, offers: Sequence[Offer], timeout: float) -> list[Outcome]:
        deadline = time.monotonic() + timeout
        claims = [claim_of(offer) for offer in offers]
        with self._shared.changed:
            grant = self._shared.index.reserve(claims, TICKET_LIFE, time.monotonic())
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
        with self._shared.changed:
            for lease in leases:
                if lease.boot == self._shared.boot:
                    self._shared.index.release(lease.id)

    def stats(self, timeout: float) -> StoreStats:
        with self._shared.changed:
            self._shared.index.expire(time.monotonic())
            return self._shared.index.stats()

    def clear(self, timeout: float) -> int:
        with self._shared.changed:
            return self._shared.index.clear(time.monotonic())

    def close(self) -> None:
        """Do nothing: the blocks stay for the other stores of this name."""

    def _write(self, ticket: int, claim: Claim, block: Block) -> Outcome:
        data = b"".join((block.header, block.payload))
        try:
            header = check_block(claim, data, self._digest)
        except Corrupt as error:
            with self._shared.changed:
                self._shared.index.counters.corrupt += 1
            return Outcome(PutStatus.CORRUPT, str(error))
        with self._shared.changed:
            stored = self._shared.index.commit(
                ticket, claim.name, data, time.monotonic(), header.parent, header.positions
            )
        return Outcome(PutStatus.STORED if stored else PutStatus.EXPIRED)

    def _recheck(self, name: bytes) -> None:
        """A reader stopped at this block: remove it if it is wrong."""
        with self._shared.changed:
            entry = self._shared.index.find(name, time.monotonic())
        if entry is None:
            return
        try:
            check_block(Claim(name, entry.size, entry.partial), entry.value, self._digest)
        except Corrupt:
            with self._shared.changed:
                self._shared.index.remove_corrupt(entry)

    def _abandon(self, ticket: int | None) -> None:
        with self._shared.changed:
            if ticket is not None:
                self._shared.index.abandon(ticket)
            self._shared.changed.notify_all()

    def _wait_for_others(
        self, offers: Sequence[Offer], outcomes: list[Outcome], deadline: float
    ) -> list[Outcome]:
        """Put again the blocks that another writer was putting, after a change."""
        late = [i for i, outcome in enumerate(outcomes) if outcome.status is PutStatus.PENDING]
        remaining = deadline - time.monotonic()
        if not late or remaining <= 0:
            return outcomes
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: self._is_settled(offers[late[0]].name), remaining)
        again = self.put([offers[i] for i in late], deadline - time.monotonic())
        for i, outcome in zip(late, again, strict=True):
            outcomes[i] = outcome
        return outcomes

    def _is_settled(self, name: bytes) -> bool:
        self._shared.index.expire(time.monotonic())
        return name not in self._shared.index.reservations
