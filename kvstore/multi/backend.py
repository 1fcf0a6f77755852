"""One store of a ``MultiStore``: its name, its threads, and whether calls wait for it.

A backend that did not answer a survey in time is late: no call waits for it until it has answered
promptly again. It is still asked, so that its recovery is noticed. A backend that broke a promise
(a block that it had was absent, or its reader refused it) is doubted: for a while it comes after
the others.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from typing import TypeVar

from kvrelay.errors import DeadlineExceeded, Unavailable
from kvstore.base import Lease, Store, SurveyResult, Want
from kvstore.multi.write_behind import WriteBehind

THREADS = 4
MOST_CALLS = 64
"""Calls running or waiting for a thread; one more fails at once."""

PROMPT_SECONDS = 0.25
DOUBT_SECONDS = 10.0
RELEASE_SECONDS = 1.0
RECHECK_SECONDS = 2.0

R = TypeVar("R")


class StoreBackend:
    """``write``: puts go here too. ``promote``: blocks read here are put into the first backend."""

    def __init__(self, name: str, store: Store, write: bool = False, promote: bool = False) -> None:
        self.name = name
        self.store = store
        self.write = write
        self.promote = promote
        self.writer = WriteBehind(name, store)
        self.late = False
        self._doubted_until = 0.0
        self._threads = ThreadPoolExecutor(THREADS, f"store {name}")
        self._room = threading.BoundedSemaphore(MOST_CALLS)

    def submit(self, call: Callable[[Store, float], R], timeout: float) -> Future[R]:
        """Run ``call`` in another thread, in this context, with the store and the seconds left."""
        asked = time.monotonic()

        def run() -> R:
            left = asked + timeout - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"{self.name} had no free thread for this call in time")
            answer = call(self.store, left)
            if time.monotonic() - asked <= PROMPT_SECONDS:
                self.late = False
            return answer

        if not self._room.acquire(blocking=False):
            return _failed(Unavailable(f"{MOST_CALLS} calls wait for {self.name}"))
        try:
            future = self._threads.submit(copy_context().run, run)
        except RuntimeError:  # the threads were shut down
            self._room.release()
            return _failed(Unavailable("this store was closed"))
        future.add_done_callback(lambda _: self._room.release())
        return future

    @property
    def doubted(self) -> bool:
        """Whether it broke a promise lately."""
        return time.monotonic() < self._doubted_until

    def doubt(self) -> None:
        """Record that it broke a promise."""
        self._doubted_until = time.monotonic() + DOUBT_SECONDS

    def release(self, lease: Lease | None) -> None:
        """Release a lease in the background. If that fails, it ends by its deadline."""
        if lease is not None:
            held = [lease]
            self.submit(lambda store, left: store.release(held, left), RELEASE_SECONDS)

    def recheck(self, want: Want) -> None:
        """Make the store verify a block after which a reader stopped, in the background.

        The block had been read ahead of the reader, so the store did not see where it stopped.
        """
        alone = dataclasses.replace(want, buffer=memoryview(bytearray(want.buffer.nbytes)))

        def stop_at_block(store: Store, left: float) -> None:
            with closing(store.get([alone], left)) as arriving:
                next(arriving, None)

        self.submit(stop_at_block, RECHECK_SECONDS)

    def abandon(self, asked: Future[SurveyResult]) -> None:
        """No call waits for this answer: its lease is released when it comes."""
        asked.add_done_callback(self._release_late)

    def close(self) -> None:
        """Calls under way fail."""
        self.writer.close()
        self.store.close()
        self.writer.join()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _release_late(self, asked: Future[SurveyResult]) -> None:
        if not asked.cancelled() and asked.exception() is None:
            self.release(asked.result().lease)


def _failed(error: Exception) -> Future[R]:
    future: Future[R] = Future()
    future.set_exception(error)
    return future
