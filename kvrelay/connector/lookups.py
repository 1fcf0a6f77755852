"""Questions to the store about waiting requests: asked once, remembered while the lease stands.

An answer belongs to a request and its length. A question that fails is answered "nothing", one
that is late is too; either is asked again after a while, if the request then still waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvrelay.connector.counters import Meter
from kvrelay.connector.geometry import Geometry, LookupKeys
from kvrelay.connector.leases import HeldLeases
from kvrelay.connector.options import ConnectorOptions
from kvrelay.connector.thread_pool import ThreadPool
from kvrelay.engine.core.external import Query
from kvrelay.errors import DeadlineExceeded, KvrelayError
from kvrelay.usage import Miss
from kvstore import Lease, LookupResult, Store


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """Of ``length`` tokens, ``tokens`` are there: ``lead`` full blocks and a tail of ``tail``.

    ``sources`` name the one of several stores that has each of these blocks. ``missing`` says why
    the next one is not there.
    """

    length: int
    tokens: int
    lead: int
    tail: int
    lease: Lease | None
    until: float  # after this it is not relied upon
    missing: Miss | None
    sources: tuple[str, ...] = ()

    def source(self, index: int) -> str | None:
        """Which of several stores has the request's block ``index``."""
        return self.sources[index] if index < len(self.sources) else None


class LookupJob:
    """A lookup under way: a job of the lane."""

    def __init__(self, owner: Lookups, request_id: str, length: int, question: LookupKeys) -> None:
        self.request_id = request_id
        self.length = length
        self.question = question
        self.deadline = owner.clock() + owner.options.lookup_seconds
        self._owner = owner

    def run(self) -> None:
        """Ask."""
        found: LookupResult | Miss = Miss.UNKNOWN
        try:
            found = self._owner.ask(self)
        finally:
            self._owner.answered(self, found)

    def give_up(self) -> None:
        """End without asking."""
        self._owner.answered(self, Miss.UNREACHABLE)


class Lookups:
    """At most one record per request: a question under way or its answer."""

    def __init__(
        self,
        store: Store,
        geometry: Geometry,
        lane: ThreadPool,
        leases: HeldLeases,
        meter: Meter,
        options: ConnectorOptions,
        clock: Callable[[], float],
        notify: Callable[[], None],
    ) -> None:
        self.options = options
        self.clock = clock
        self._store = store
        self._geometry = geometry
        self._lane = lane
        self._leases = leases
        self._meter = meter
        self._notify = notify
        self._lock = threading.Lock()
        self._records: dict[str, LookupJob | LookupAnswer] = {}
        self._boot: bytes | None = None

    def find(self, query: Query) -> int | None:
        """Tokens after ``query.local``, or ``None`` while nothing is known."""
        now, length = self.clock(), len(query.tokens)
        if query.local >= length - 1:
            return 0  # the last position is computed anyway
        with self._lock:
            record = self._records.get(query.request_id)
            if record is not None and record.length == length:
                if isinstance(record, LookupAnswer) and now < record.until:
                    return self._told(query, record)
                if isinstance(record, LookupJob) and now < record.deadline:
                    return None
                if isinstance(record, LookupJob):  # late: its answer will find no record
                    self._records[query.request_id] = self._nothing(length, Miss.TOO_LATE)
                    self._meter.add(lookup_failures=1)
                    return -query.local
            question = self._geometry.of(query.space).question(query.tokens, query.names)
            asking = LookupJob(self, query.request_id, length, question)
            self._records[query.request_id] = asking
        if isinstance(record, LookupAnswer):
            self._leases.give_back(record.lease)
        self._meter.add(lookups=1, open_lookups=1)
        self._lane.submit(asking)
        return None

    def _told(self, query: Query, answer: LookupAnswer) -> int:
        """Tokens after ``query.local``. If there are none, no load will follow to end the lease."""
        if answer.tokens <= query.local and answer.lease is not None:
            until = min(answer.until, self.clock() + self.options.retry_seconds)
            self._records[query.request_id] = replace(answer, lease=None, until=until)
            self._leases.give_back(answer.lease)
        return answer.tokens - query.local

    def why(self, request_id: str) -> Miss | None:
        """Why the block after those that were found is not there."""
        with self._lock:
            record = self._records.get(request_id)
        return record.missing if isinstance(record, LookupAnswer) else None

    def take(self, request_id: str) -> LookupAnswer | None:
        """Forget a request; its answer, whose lease is now the caller's."""
        with self._lock:
            record = self._records.pop(request_id, None)
        return record if isinstance(record, LookupAnswer) else None

    def release(self, request_id: str) -> None:
        """Forget a request and give its lease back."""
        if (answer := self.take(request_id)) is not None:
            self._leases.give_back(answer.lease)

    def close(self) -> None:
        """Forget them all and give their leases back."""
        with self._lock:
            records = self._records
            self._records = {}
        for record in records.values():
            if isinstance(record, LookupAnswer):
                self._leases.give_back(record.lease)

    def ask(self, asking: LookupJob) -> LookupResult | Miss:
        """The store's answer, or why there is none."""
        remaining = asking.deadline - self.clock()
        if remaining <= 0:
            return Miss.TOO_LATE
        question = asking.question
        try:
            return self._store.lookup(
                question.names,
                question.tails,
                self.options.lease_seconds,
                remaining,
                question.openings,
            )
        except DeadlineExceeded:
            return Miss.TOO_LATE
        except KvrelayError:
            return Miss.UNREACHABLE

    def answered(self, asking: LookupJob, found: LookupResult | Miss) -> None:
        """Record the answer, unless nobody waits for it any more."""
        failed = isinstance(found, Miss)
        if isinstance(found, Miss):
            answer = self._nothing(asking.length, found)
        else:
            answer = self._answer(asking, found)
        if answer.lease is not None:
            self._leases.took()
        with self._lock:
            current = self._records.get(asking.request_id) is asking
            if current:
                self._records[asking.request_id] = answer
        if current:
            self._meter.add(
                lookup_failures=failed,
                lookup_hits=answer.tokens > 0,
                lookup_tokens=answer.tokens,
            )
        else:
            self._leases.give_back(answer.lease)
        self._meter.add(open_lookups=-1)
        self._notify()

    def _answer(self, asking: LookupJob, found: LookupResult) -> LookupAnswer:
        tail = 0 if found.tail is None else asking.question.counts[found.tail]
        tokens = found.lead * self._geometry.block_size + tail
        if found.lease is None:
            until = self.clock() + self.options.retry_seconds
        else:
            until = found.lease.deadline - self.options.lease_margin_seconds
        missing = self._since_restart(found)
        return LookupAnswer(
            asking.length, tokens, found.lead, tail, found.lease, until, missing, found.sources
        )

    def _since_restart(self, found: LookupResult) -> Miss | None:
        """A store that was started anew does not know what it held before."""
        with self._lock:
            self._boot = self._boot or found.boot
            same = self._boot == found.boot
        unsure = found.missing is Miss.NEVER_STORED and not same
        return Miss.UNKNOWN if unsure else found.missing

    def _nothing(self, length: int, why: Miss) -> LookupAnswer:
        return LookupAnswer(length, 0, 0, 0, None, self.clock() + self.options.retry_seconds, why)
