"""The circuit breaker: calls to a store or server that failed are refused at once for a while.

Without it every request would wait for its own timeout on a dead store. After a pause one caller
may try; the pause doubles up to a limit, and an answer ends it. ``BreakerStore`` puts one in front
of a whole store; each server of a Redis cluster has one of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager

from kvrelay.errors import DeadlineExceeded, KvrelayError, Unavailable
from kvstore.base import (
    GetResult,
    Lease,
    LookupResult,
    NameQuery,
    Offer,
    Outcome,
    Store,
    SurveyResult,
    Want,
)
from kvstore.stats import StoreStats
from kvstore.urls import public_url

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 2.0
TIMEOUTS_TO_OPEN = 2

Clock = Callable[[], float]


class CircuitBreaker:
    """Thread-safe. ``name`` is what errors call the other side by; ``clock`` is for tests."""

    def __init__(self, name: str, clock: Clock = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = 0.0
        self._next_try = 0.0

    @property
    def open(self) -> bool:
        """Whether calls are refused now."""
        with self._lock:
            return self._clock() < self._next_try

    @contextmanager
    def call(self, timeout: float) -> Iterator[None]:
        """The hook around one call: refuse it, or make it and record how it ended.

        A call without time left is ``DeadlineExceeded`` and no failure of the other side.
        """
        if timeout <= 0:
            raise DeadlineExceeded("no time was left to ask the store")
        if (refused := self.enter()) is not None:
            raise refused
        with self.recorded():
            yield

    def enter(self) -> Unavailable | None:
        """``None``: the caller may ask, and records how it ended; else the error to raise."""
        with self._lock:
            now = self._clock()
            if now < self._next_try:
                wait = self._next_try - now
                return Unavailable(f"{self._name} did not answer; the next try is in {wait:.1f} s")
            if self._pause:
                self._next_try = now + self._pause  # this caller tries; the others wait for it
            return None

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record how a call ends that is made whatever the state. An error can be an answer."""
        try:
            yield
        except (Unavailable, DeadlineExceeded) as error:
            self.failed(error)
            raise
        except KvrelayError:
            self.answered()
            raise
        self.answered()

    def failed(self, error: KvrelayError) -> None:
        """There was no answer. One that is only late is forgiven once."""
        with self._lock:
            self._failures += 1
            if isinstance(error, Unavailable) or self._failures >= TIMEOUTS_TO_OPEN:
                self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
                self._next_try = self._clock() + self._pause

    def answered(self) -> None:
        """There was an answer: the circuit is closed."""
        with self._lock:
            self._failures = 0
            self._pause = 0.0
            self._next_try = 0.0


class BreakerStore:
    """A ``Store`` that passes every call to another one, through the hook of one breaker."""

    def __init__(self, store: Store, clock: Clock = time.monotonic) -> None:
        self._store = store
        self._breaker = CircuitBreaker(public_url(store.url), clock)

    @property
    def url(self) -> str:
        return self._store.url

    def lookup(self, query: NameQuery, timeout: float) -> LookupResult:
        with self._breaker.call(timeout):
            return self._store.lookup(query, timeout)

    def survey(self, query: NameQuery, timeout: float) -> SurveyResult:
        with self._breaker.call(timeout):
            return self._store.survey(query, timeout)

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        """The first block is an answer, even if the caller does not read the others."""
        first = True
        with self._breaker.call(timeout), closing(self._store.get(wants, timeout)) as arriving:
            for got in arriving:
                if first:
                    self._breaker.answered()
                    first = False
                yield got

    def put(self, offers: Sequence[Offer], timeout: float) -> list[Outcome]:
        with self._breaker.call(timeout):
            return self._store.put(offers, timeout)

    def release(self, leases: Sequence[Lease], timeout: float) -> None:
        with self._breaker.call(timeout):
            self._store.release(leases, timeout)

    def stats(self, timeout: float) -> StoreStats:
        with self._breaker.call(timeout):
            return self._store.stats(timeout)

    def clear(self, timeout: float) -> int:
        with self._breaker.call(timeout):
            return self._store.clear(timeout)

    def close(self) -> None:
        self._store.close()
