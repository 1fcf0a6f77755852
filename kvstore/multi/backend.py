"""One of several stores: its name, its threads, and whether it is worth waiting for.

A store that kept a caller waiting in vain is late: nobody waits for it again until it has answered
promptly once more. It is asked all the same, so that its recovery is seen. One that broke a promise
(a block that it had was not there, or was refused by its reader) is doubted: for a while it comes
after the others.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

from kvrelay.errors import DeadlineExceeded, Unavailable
from kvstore.base import Lease, Store, SurveyResult, Want
from kvstore.multi.write_behind import WriteBehind

THREADS = 4
MOST_CALLS = 64
"""Under way or waiting for a thread; one more fails at once."""

PROMPT_SECONDS = 0.25
DOUBT_SECONDS = 10.0
RELEASE_SECONDS = 1.0
LOOK_SECONDS = 2.0

R = TypeVar("R")


class StoreBackend:
    """``write``: what is saved goes here too. ``promote``: what is read here goes to the first."""

    def __init__(self, name: str, store: Store, write: bool = False, promote: bool = False) -> None:
        self.name = name
        self.store = store
        self.write = write
        self.promote = promote
        self.behind = WriteBehind(name, store)
        self.late = False
        self._doubted_until = 0.0
        self._threads = ThreadPoolExecutor(THREADS, f"store {name}")
        self._room = threading.BoundedSemaphore(MOST_CALLS)

    def ask(self, call: Callable[[Store, float], R], timeout: float) -> Future[R]:
        """Call with the store and the seconds left, in another thread."""
        asked = time.monotonic()

        def run() -> R:
            left = asked + timeout - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"{self.name} had no thread for this call in time")
            answer = call(self.store, left)
            if time.monotonic() - asked <= PROMPT_SECONDS:
                self.late = False
            return answer

        if not self._room.acquire(blocking=False):
            return _failed(Unavailable(f"{MOST_CALLS} calls wait for {self.name}"))
        try:
            future = self._threads.submit(run)
        except RuntimeError:  # its threads are no more
            self._room.release()
            return _failed(Unavailable("this store was closed"))
        future.add_done_callback(lambda _: self._room.release())
        return future

    @property
    def doubted(self) -> bool:
        """Whether it broke a promise of late."""
        return time.monotonic() < self._doubted_until

    def doubt(self) -> None:
        """It broke a promise."""
        self._doubted_until = time.monotonic() + DOUBT_SECONDS

    def give_back(self, lease: Lease | None) -> None:
        """Nobody needs it; nobody waits. If that fails it ends by its deadline."""
        if lease is not None:
            held = [lease]
            self.ask(lambda store, left: store.release(held, left), RELEASE_SECONDS)

    def look_again(self, want: Want) -> None:
        """A reader left at this block, which was read ahead of him: the store is told in its words.

        Nobody waits.
        """
        alone = dataclasses.replace(want, buffer=memoryview(bytearray(want.buffer.nbytes)))

        def leave(store: Store, left: float) -> None:
            with closing(store.get([alone], left)) as arriving:
                next(arriving, None)

        self.ask(leave, LOOK_SECONDS)

    def disown(self, asked: Future[SurveyResult]) -> None:
        """Nobody waits for this answer any more: what it holds goes back when it comes."""
        asked.add_done_callback(self._returned)

    def close(self) -> None:
        """End the calls under way."""
        self.behind.close()
        self.store.close()
        self.behind.join()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _returned(self, asked: Future[SurveyResult]) -> None:
        if not asked.cancelled() and asked.exception() is None:
            self.give_back(asked.result().lease)


def _failed(error: Exception) -> Future[R]:
    future: Future[R] = Future()
    future.set_exception(error)
    return future
