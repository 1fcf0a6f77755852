"""A store in front of a store: when the one behind is gone, calls fail at once.

Without it every request would wait for its own timeout on a dead store. After a failure nobody
asks for a while, then one caller tries; the pause doubles up to a limit and ends with an answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager

from common.errors import DeadlineExceeded, KvrelayError, Unavailable
from kvstore.base import Found, Got, Lease, Offer, Outcome, Seen, Store, Want
from kvstore.records import Tail
from kvstore.stats import Stats

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 2.0
TIMEOUTS_TO_OPEN = 2


class Breaker:
    """A ``Store``. ``clock`` is for tests."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = 0.0
        self._closed_at = 0.0  # when the next caller may try

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
    ) -> Found:
        """As the protocol says."""
        with self._guarded():
            return self._store.lookup(names, tails, ttl, timeout, openings)

    def survey(
        self, names: Sequence[bytes], ttl: float, timeout: float, openings: Sequence[int] = ()
    ) -> Seen:
        """As the protocol says."""
        with self._guarded():
            return self._store.survey(names, ttl, timeout, openings)

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[Got, None, None]:
        """As the protocol says. The first block is an answer, even if nobody reads the rest."""
        first = True
        with self._guarded(), closing(self._store.get(wants, timeout)) as arriving:
            for got in arriving:
                if first:
                    self._answered()
                    first = False
                yield got

    def put(self, offers: Sequence[Offer], timeout: float) -> list[Outcome]:
        """As the protocol says."""
        with self._guarded():
            return self._store.put(offers, timeout)

    def release(self, leases: Sequence[Lease], timeout: float) -> None:
        """As the protocol says."""
        with self._guarded():
            self._store.release(leases, timeout)

    def stats(self, timeout: float) -> Stats:
        """As the protocol says."""
        with self._guarded():
            return self._store.stats(timeout)

    def clear(self, timeout: float) -> int:
        """As the protocol says."""
        with self._guarded():
            return self._store.clear(timeout)

    def close(self) -> None:
        """As the protocol says."""
        self._store.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        except (Unavailable, DeadlineExceeded) as error:
            self._failed(isinstance(error, Unavailable))
            raise
        except KvrelayError:
            self._answered()
            raise
        self._answered()

    def _enter(self) -> None:
        with self._lock:
            now = self._clock()
            if now < self._closed_at:
                raise Unavailable(
                    f"{self.url} did not answer; the next try is in {self._closed_at - now:.1f} s"
                )
            if self._pause:
                self._closed_at = now + self._pause  # this caller tries; the others wait for it

    def _failed(self, gone: bool) -> None:
        with self._lock:
            self._failures += 1
            if gone or self._failures >= TIMEOUTS_TO_OPEN:
                self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
                self._closed_at = self._clock() + self._pause

    def _answered(self) -> None:
        with self._lock:
            self._failures, self._pause, self._closed_at = 0, 0.0, 0.0
