"""A store in front of a store: when the one behind is gone, calls fail at once.

Without it every request would wait for its own timeout on a dead store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager

from kvrelay.errors import DeadlineExceeded, KvrelayError, Unavailable
from kvstore.base import (
    GetResult,
    Lease,
    LookupResult,
    Offer,
    Outcome,
    Store,
    SurveyResult,
    Tail,
    Want,
)
from kvstore.circuit import CircuitBreaker
from kvstore.stats import StoreStats
from kvstore.urls import public_url


class BreakerStore:
    """A ``Store``. ``clock`` is for tests."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._circuit = CircuitBreaker(clock)

    @property
    def url(self) -> str:
        """As the protocol says."""
        return self._store.url

    def lookup(
        self,
        names: Sequence[bytes],
        tails: Sequence[Tail],
        ttl: float,
        timeout: float,
        openings: Sequence[int] = (),
    ) -> LookupResult:
        """As the protocol says."""
        with self._guarded(timeout):
            return self._store.lookup(names, tails, ttl, timeout, openings)

    def survey(
        self, names: Sequence[bytes], ttl: float, timeout: float, openings: Sequence[int] = ()
    ) -> SurveyResult:
        """As the protocol says."""
        with self._guarded(timeout):
            return self._store.survey(names, ttl, timeout, openings)

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        """As the protocol says. The first block is an answer, even if nobody reads the rest."""
        first = True
        with self._guarded(timeout), closing(self._store.get(wants, timeout)) as arriving:
            for got in arriving:
                if first:
                    self._circuit.answered()
                    first = False
                yield got

    def put(self, offers: Sequence[Offer], timeout: float) -> list[Outcome]:
        """As the protocol says."""
        with self._guarded(timeout):
            return self._store.put(offers, timeout)

    def release(self, leases: Sequence[Lease], timeout: float) -> None:
        """As the protocol says."""
        with self._guarded(timeout):
            self._store.release(leases, timeout)

    def stats(self, timeout: float) -> StoreStats:
        """As the protocol says."""
        with self._guarded(timeout):
            return self._store.stats(timeout)

    def clear(self, timeout: float) -> int:
        """As the protocol says."""
        with self._guarded(timeout):
            return self._store.clear(timeout)

    def close(self) -> None:
        """As the protocol says."""
        self._store.close()

    @contextmanager
    def _guarded(self, timeout: float) -> Iterator[None]:
        if timeout <= 0:
            raise DeadlineExceeded("no time was left to ask the store")  # no failure of its own
        if wait := self._circuit.enter():
            raise Unavailable(
                f"{public_url(self.url)} did not answer; the next try is in {wait:.1f} s"
            )
        try:
            yield
        except (Unavailable, DeadlineExceeded) as error:
            self._circuit.failed(isinstance(error, Unavailable))
            raise
        except KvrelayError:
            self._circuit.answered()
            raise
        self._circuit.answered()
