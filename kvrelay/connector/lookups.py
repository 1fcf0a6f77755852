"""Lookups for waiting requests: sent once, remembered while the lease stands.

An answer belongs to a request and its length. As many lookups are in flight as there are threads,
and the deadline of each starts when it is sent. A lookup that fails or is late counts as an answer
without tokens. It is repeated after a while if the request still waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from kvrelay.connector.context import JobContext
from kvrelay.connector.counters import Meter
from kvrelay.connector.geometry import Geometry, LookupKeys
from kvrelay.connector.thread_pool import ThreadPool
from kvrelay.engine.core.external import Query
from kvrelay.errors import DeadlineExceeded, KvrelayError, Unavailable
from kvrelay.usage import Miss
from kvstore import Lease, LookupResult, Store
from kvstore.base import NameQuery

log = logging.getLogger(__name__)

RELEASE_SECONDS = 1.0


class LeaseReleaser:
    """Releases leases in the background, in batches."""

    def __init__(self, store: Store, threads: ThreadPool, meter: Meter) -> None:
        self._store = store
        self._threads = threads
        self._meter = meter
        self._lock = threading.Lock()
        self._released: list[Lease] = []

    def release(self, lease: Lease | None) -> None:
        """Release a lease, if there is one; returns at once."""
        if lease is None:
            return
        with self._lock:
            self._released.append(lease)
            first = len(self._released) == 1
        if first:
            self._threads.submit(self)

    def run(self) -> None:
        """Release all that wait in one call. If it fails, they end by their deadlines."""
        if not (leases := self._take()):
            return
        try:
            with suppress(KvrelayError):
                self._store.release(leases, RELEASE_SECONDS)
        finally:
            self._meter.add(open_leases=-len(leases))

    def give_up(self) -> None:
        """Leave the leases to their deadlines."""
        self._meter.add(open_leases=-len(self._take()))

    def _take(self) -> list[Lease]:
        with self._lock:
            leases = self._released
            self._released = []
        return leases


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """Of ``length`` tokens the store has ``tokens``: ``lead`` full blocks and a tail of ``tail``.

    ``sources`` name the store of each of these blocks, if there are several. ``missing`` is the
    reason why the next block is missing.
    """

    length: int
    tokens: int
    lead: int
    tail: int
    lease: Lease | None
    until: float  # after this the answer is not relied upon
    missing: Miss | None
    sources: tuple[str, ...] = ()

    def source(self, index: int) -> str | None:
        """Which of several stores has the request's block ``index``."""
        return self.sources[index] if index < len(self.sources) else None


@dataclass(slots=True, eq=False)
class LookupJob:
    """One lookup on a thread of the connector.

    ``deadline`` is that of the wait for a thread, and once the lookup is sent that of its answer.
    """

    owner: Lookups
    request_id: str
    length: int
    keys: LookupKeys
    deadline: float

    def run(self) -> None:
        """Look up, and record the answer whatever happens."""
        result: LookupResult | Miss = Miss.UNKNOWN
        try:
            result = self.owner.look_up(self)
        finally:
            self.owner.record(self, result)

    def give_up(self) -> None:
        """End without a lookup."""
        self.owner.record(self, Miss.UNREACHABLE)


class Lookups:
    """At most one record per request: a lookup under way or its answer."""

    def __init__(
        self,
        context: JobContext,
        geometry: Geometry,
        threads: ThreadPool,
        leases: LeaseReleaser,
        clock: Callable[[], float],
        notify: Callable[[], None],
    ) -> None:
        self.options = context.options
        self.clock = clock
        self._store = context.store
        self._meter = context.meter
        self._geometry = geometry
        self._threads = threads
        self._leases = leases
        self._notify = notify
        self._lock = threading.Lock()
        self._records: dict[str, LookupJob | LookupAnswer] = {}
        self._boot: bytes | None = None
        self._reached = True

    def find(self, query: Query) -> int | None:
        """Tokens after ``query.local``; ``None`` while the lookup is under way."""
        now = self.clock()
        length = len(query.tokens)
        if query.local >= length - 1:
            return 0  # the last position is always computed
        with self._lock:
            record = self._records.get(query.request_id)
            if record is not None and record.length == length:
                if isinstance(record, LookupAnswer) and now < record.until:
                    return self._use(query, record)
                if isinstance(record, LookupJob) and now < record.deadline:
                    return None
                if isinstance(record, LookupJob):  # late: its answer will find no record
                    self._records[query.request_id] = self._empty(length, Miss.TOO_LATE)
                    self._meter.add(lookup_failures=1)
                    return -query.local
            keys = self._geometry.of(query.space).lookup_keys(query.tokens, query.names)
            deadline = now + self.options.lookup_queue_seconds
            job = LookupJob(self, query.request_id, length, keys, deadline)
            self._records[query.request_id] = job
        if isinstance(record, LookupAnswer):
            self._leases.release(record.lease)
        self._meter.add(open_lookups=1)
        self._threads.submit(job)
        return None

    def _use(self, query: Query, answer: LookupAnswer) -> int:
        """Tokens after ``query.local``. If there are none, no load will follow to end the lease."""
        if answer.tokens <= query.local and answer.lease is not None:
            until = min(answer.until, self.clock() + self.options.retry_seconds)
            self._records[query.request_id] = replace(answer, lease=None, until=until)
            self._leases.release(answer.lease)
        return answer.tokens - query.local

    def why(self, request_id: str) -> Miss | None:
        """Why the first block after those that were found is missing."""
        with self._lock:
            record = self._records.get(request_id)
        return record.missing if isinstance(record, LookupAnswer) else None

    def take(self, request_id: str) -> LookupAnswer | None:
        """Forget a request and return its answer, whose lease is now the caller's."""
        with self._lock:
            record = self._records.pop(request_id, None)
        return record if isinstance(record, LookupAnswer) else None

    def release(self, request_id: str) -> None:
        """Forget a request and release its lease."""
        if (answer := self.take(request_id)) is not None:
            self._leases.release(answer.lease)

    def close(self) -> None:
        """Forget all requests and release their leases."""
        with self._lock:
            records = self._records
            self._records = {}
        for record in records.values():
            if isinstance(record, LookupAnswer):
                self._leases.release(record.lease)

    def look_up(self, job: LookupJob) -> LookupResult | Miss:
        """Send a lookup; returns the store's answer, or why there is none."""
        keys, options = job.keys, self.options
        with self._lock:
            # The request may have left, or the lookup may have waited too long for this thread.
            if self._records.get(job.request_id) is not job:
                return Miss.TOO_LATE
            job.deadline = self.clock() + options.lookup_seconds
        self._meter.add(lookups=1)
        query = NameQuery(keys.names, keys.tails, options.lease_seconds, keys.first_block_hashes)
        try:
            result = self._store.lookup(query, options.lookup_seconds)
        except DeadlineExceeded:
            return Miss.TOO_LATE
        except KvrelayError as error:
            if isinstance(error, Unavailable) and self._changes(reached=False):
                log.warning("the store cannot be used, so prompts are computed: %s", error)
            return Miss.UNREACHABLE
        if self._changes(reached=True):
            log.warning("the store can be used again")
        return result

    def _changes(self, reached: bool) -> bool:
        with self._lock:
            before = self._reached
            self._reached = reached
        return before is not reached

    def record(self, job: LookupJob, result: LookupResult | Miss) -> None:
        """Record the answer, unless another lookup replaced this one or the request has left."""
        failed = isinstance(result, Miss)
        if isinstance(result, Miss):
            answer = self._empty(job.length, result)
        else:
            answer = self._answer(job, result)
        if answer.lease is not None:
            self._meter.add(open_leases=1)
        with self._lock:
            current = self._records.get(job.request_id) is job
            if current:
                self._records[job.request_id] = answer
        if current:
            self._meter.add(
                lookup_failures=failed,
                lookup_hits=answer.tokens > 0,
                lookup_tokens=answer.tokens,
            )
        else:
            self._leases.release(answer.lease)
        self._meter.add(open_lookups=-1)
        self._notify()

    def _answer(self, job: LookupJob, result: LookupResult) -> LookupAnswer:
        tail = 0 if result.tail is None else job.keys.counts[result.tail]
        if result.lease is None:
            until = self.clock() + self.options.retry_seconds
        else:
            until = result.lease.deadline - self.options.lease_margin_seconds
        return LookupAnswer(
            length=job.length,
            tokens=result.lead * self._geometry.block_size + tail,
            lead=result.lead,
            tail=tail,
            lease=result.lease,
            until=until,
            missing=self._reason(result),
            sources=result.sources,
        )

    def _reason(self, result: LookupResult) -> Miss | None:
        """Why the next block is missing: a restarted store cannot know what it held before."""
        with self._lock:
            self._boot = self._boot or result.boot
            same = self._boot == result.boot
        unsure = result.missing is Miss.NEVER_STORED and not same
        return Miss.UNKNOWN if unsure else result.missing

    def _empty(self, length: int, missing: Miss) -> LookupAnswer:
        until = self.clock() + self.options.retry_seconds
        return LookupAnswer(length, 0, 0, 0, None, until, missing)
