"""Write-behind: copies of blocks in a bounded queue, put into a backend by a thread in order.

What does not fit is dropped and counted: a slow backend loses blocks, and no call waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, replace

from kvrelay.errors import KvrelayError
from kvstore.base import Block, Offer, PutStatus, Store

log = logging.getLogger("kvrelay.store")

LIMIT_BYTES = 256 << 20
BATCH_BYTES = 32 << 20
PUT_SECONDS = 10.0
JOIN_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class WriteBehindCounts:
    """Blocks added so far, by outcome."""

    stored: int = 0
    existed: int = 0
    refused: int = 0  # no room, or not what the header says
    failed: int = 0  # the backend was unavailable
    dropped: int = 0  # the queue was full
    waiting: int = 0


class WriteBehind:
    """Puts into ``store`` in a thread of its own, which starts with the first block."""

    def __init__(self, name: str, store: Store, limit: int = LIMIT_BYTES) -> None:
        self._name = name
        self._store = store
        self._limit = limit
        self._wake = threading.Condition()
        self._queue: deque[Offer] = deque()
        self._bytes = 0
        self._counts = WriteBehindCounts()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def counts(self) -> WriteBehindCounts:
        """The blocks so far, by outcome."""
        return self._counts

    def has_room(self, size: int) -> bool:
        """Whether a block of ``size`` bytes fits into the queue now."""
        return self._bytes + size <= self._limit and not self._closed

    def drop(self) -> None:
        """Count a block that was not copied because the queue was full."""
        with self._wake:
            self._count(dropped=1)

    def add(self, offer: Offer) -> bool:
        """Queue a block, whose bytes must not change from now on; false if it was dropped."""
        with self._wake:
            if not self.has_room(offer.size):
                self._count(dropped=1)
                return False
            self._queue.append(offer)
            self._bytes += offer.size
            self._count(waiting=1)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="write-behind", daemon=True)
                self._thread.start()
            self._wake.notify()
            return True

    def flush(self, timeout: float) -> bool:
        """Wait until the queue is empty; false if it was not within ``timeout``."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._counts.waiting, timeout)

    def close(self) -> None:
        """Drop the queue; call ``join`` after the store is closed too."""
        with self._wake:
            self._closed = True
            self._count(dropped=len(self._queue), waiting=-len(self._queue))
            self._queue.clear()
            self._wake.notify_all()

    def join(self) -> None:
        """Wait for the running put."""
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        while batch := self._next():
            try:
                self._put(batch)
            except KvrelayError as error:
                log.info("%s: %d blocks were not written: %s", self._name, len(batch), error)
                self._done(batch, failed=len(batch))
            except Exception as error:  # noqa: BLE001 - the edge of a thread: it ends this batch
                self._crash(batch, error)

    def _next(self) -> list[Offer]:
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._closed)
            batch: dict[bytes, Offer] = {}
            size = 0
            while self._queue and self._queue[0].name not in batch:
                offer = self._queue[0]
                size += offer.size
                if batch and size > BATCH_BYTES:
                    break
                batch[offer.name] = self._queue.popleft()
        return list(batch.values())

    def _put(self, batch: list[Offer]) -> None:
        kept = [outcome.status for outcome in self._store.put(batch, PUT_SECONDS)]
        stored, existed = kept.count(PutStatus.STORED), kept.count(PutStatus.EXISTED)
        self._done(batch, stored=stored, existed=existed, refused=len(kept) - stored - existed)

    def _crash(self, batch: list[Offer], error: Exception) -> None:
        log.error("%s: %d blocks were not written", self._name, len(batch), exc_info=error)
        self._done(batch, failed=len(batch))

    def _done(self, batch: list[Offer], **changes: int) -> None:
        with self._wake:
            self._bytes -= sum(offer.size for offer in batch)
            self._count(waiting=-len(batch), **changes)
            self._wake.notify_all()

    def _count(self, **changes: int) -> None:
        now = self._counts
        self._counts = replace(now, **{k: getattr(now, k) + n for k, n in changes.items()})


def copy_of(name: bytes, block: Block, partial: bool) -> Offer:
    """An offer of a copy of a block whose payload lies in a caller's buffer."""
    copied = replace(block, payload=memoryview(bytes(block.payload)))
    return Offer(name, block.size, partial, lambda: copied)
