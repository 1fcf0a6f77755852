"""External KV in a block store: the ``Connector`` that workers use.

Calls return at once. Lookups, loads and saves run on threads of their own, so that no kind waits
for another. If the store fails, the result is a miss and the worker computes.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.block import Namer, Namespace
from kvrelay.connector.context import BlockMemory, ConnectorOptions, DeviceCopies, JobContext
from kvrelay.connector.counters import ConnectorCounters, Meter
from kvrelay.connector.geometry import Geometry, LoadTarget
from kvrelay.connector.loading import LoadJob, RecheckJob, load_targets
from kvrelay.connector.lookups import LeaseReleaser, Lookups
from kvrelay.connector.saving import SaveJob
from kvrelay.connector.thread_pool import ThreadPool
from kvrelay.engine.core.external import Load, Query, Save, Saved, TransferEvent
from kvrelay.rpc.deadline import Deadline
from kvrelay.usage import Miss
from kvstore import Lease, Store

CUT_OFF_SECONDS = 0.5
JOIN_SECONDS = 5.0
RECHECK_SECONDS = 2.0
"""The longest that a save waits for the recheck of its blocks."""


@dataclass(slots=True)
class _KeptLease:
    """A lease on the blocks that a request found and continues; ``loaded``: its load has ended."""

    lease: Lease | None
    loaded: bool = False


class StoreConnector:
    """A ``Connector`` over ``store``; closing it closes the store.

    ``copies``: for a pool on a device, copies of blocks in batches; without them each block is
    copied alone.
    """

    def __init__(
        self,
        store: Store,
        namer: Namer,
        namespace: Namespace,
        pool: BlockMemory,
        options: ConnectorOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
        copies: DeviceCopies | None = None,
    ) -> None:
        options = options or ConnectorOptions()
        self._context = JobContext(store, pool, options, Meter(), copies)
        self._meter = self._context.meter
        self._geometry = Geometry(namer, namespace, pool.shape)
        self._lookup_threads = self._threads("store-lookup", options.lookup_threads)
        self._load_threads = self._threads("store-load", options.load_threads)
        self._save_threads = [
            self._threads(f"store-save-{number}", 1) for number in range(options.save_threads)
        ]
        self._recheck_threads = self._threads("store-recheck", 1)
        self._release_threads = self._threads("store-release", 1)
        self._leases = LeaseReleaser(store, self._release_threads, self._meter)
        self._lookups = Lookups(
            self._context, self._geometry, self._lookup_threads, self._leases, clock, self._wake
        )
        self._lock = threading.Lock()
        self._kept: dict[str, _KeptLease] = {}  # by request
        self._ordered: dict[tuple[str, int], _KeptLease] = {}  # by request and epoch
        self._loads: dict[tuple[str, int], LoadJob] = {}  # open ones, by request and epoch
        self._checked = threading.Condition()
        self._rechecking: set[bytes] = set()  # names, guarded by ``_checked``
        self._events: list[TransferEvent] = []
        self._notify: Callable[[], None] | None = None

    @property
    def counters(self) -> ConnectorCounters:
        """The counters as they are now."""
        return self._meter.reading

    def start(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        for threads in self._all_threads():
            threads.start()

    def lookup(self, query: Query) -> int | None:
        return self._lookups.find(query)

    def why(self, request_id: str) -> Miss | None:
        return self._lookups.why(request_id)

    def load(self, load: Load) -> None:
        self.fetch(load, self.order(load))

    def order(self, load: Load) -> tuple[LoadTarget, ...]:
        """What a load has to fetch: the first half of ``load``, where the lookup was made.

        The lookup's answer ends with it. Its lease ends with ``settle`` if the store has every
        full block of the request. Else the rest will be saved after what was found, which must not
        be evicted for it: the lease ends with the leg.
        """
        answer = self._lookups.take(load.request_id)
        targets = load_targets(load, answer, self._geometry.of(load.space))
        kept = _KeptLease(None if answer is None else answer.lease)
        self._let_go(load.request_id)
        with self._lock:
            self._ordered[load.request_id, load.epoch] = kept
            if answer is not None and answer.lead < len(load.names):
                self._kept[load.request_id] = kept
        return tuple(targets)

    def settle(self, request_id: str, epoch: int) -> None:
        """A load that was ordered here has ended; unknown ones are ignored."""
        with self._lock:
            kept = self._ordered.pop((request_id, epoch), None)
            if kept is None:
                return
            kept.loaded = True
            needed = self._kept.get(request_id) is kept
        if not needed:
            self._leases.release(kept.lease)

    def fetch(self, load: Load, targets: Sequence[LoadTarget]) -> None:
        """Start to fill blocks: the second half of ``load``, where the memory is."""

        def end(event: TransferEvent, suspect: Sequence[LoadTarget]) -> None:
            with self._lock:
                self._loads.pop((load.request_id, load.epoch), None)
            self.settle(load.request_id, load.epoch)
            self._recheck(suspect)
            self._post(event)

        self._meter.add(loads=1, open_loads=1)
        job = LoadJob(self._context, load, targets, end)
        with self._lock:
            self._loads[load.request_id, load.epoch] = job
        self._load_threads.submit(job)

    def cancel(self, request_id: str, epoch: int) -> bool:
        """At once if the load waits for a thread; a load that runs ends before its next batch."""
        with self._lock:
            job = self._loads.get((request_id, epoch))
        return job is None or job.cancel()

    def save(self, save: Save) -> None:
        """Start a save; it is dropped if too many bytes are waiting to be saved.

        A request that saves has been admitted: if it has not loaded by then, it never will, and
        the lease of its lookup is released.
        """
        self._lookups.release(save.request_id)
        geometry = self._geometry.of(save.space)
        job = SaveJob(self._context, save, geometry, self._wait_for_recheck, self._post)
        waiting = self._meter.reading.open_save_bytes
        if waiting and waiting + job.nbytes > self._context.options.max_pending_save_bytes:
            self._meter.add(saves=1, saves_dropped=1)
            self._post(Saved(save.request_id, save.epoch, save.serial, 0))
            return
        self._meter.add(saves=1, open_saves=1, open_save_bytes=job.nbytes)
        # The same thread for all saves of a request keeps them in order.
        number = zlib.crc32(save.request_id.encode()) % len(self._save_threads)
        self._save_threads[number].submit(job)

    def release(self, request_id: str) -> None:
        self._lookups.release(request_id)
        self._let_go(request_id)

    def poll(self) -> list[TransferEvent]:
        with self._lock:
            events = self._events
            self._events = []
        return events

    def close(self) -> None:
        """Stop. A call under way has a moment to give back its lease, then it is cut off."""
        self._lookups.close()
        for request_id in list(self._kept):
            self._let_go(request_id)
        for threads in self._all_threads()[:-1]:
            threads.close()
        self._join(self._all_threads()[:-1], CUT_OFF_SECONDS)
        self._leases.run()
        self._release_threads.close()
        self._context.store.close()
        self._join(self._all_threads(), JOIN_SECONDS)

    def _join(self, pools: Sequence[ThreadPool], seconds: float) -> None:
        deadline = Deadline.after(seconds)
        for threads in pools:
            threads.join(deadline)

    def _threads(self, name: str, count: int) -> ThreadPool:
        return ThreadPool(name, count, lambda: self._meter.add(crashes=1))

    def _all_threads(self) -> list[ThreadPool]:
        return [
            self._lookup_threads,
            self._load_threads,
            *self._save_threads,
            self._recheck_threads,
            self._release_threads,
        ]

    def _recheck(self, suspect: Sequence[LoadTarget]) -> None:
        """Check the blocks after a wrong one, each once though many loads may stop before it."""
        with self._checked:
            new = [target for target in suspect if target.expected.name not in self._rechecking]
            self._rechecking.update(target.expected.name for target in new)
        if new:
            self._recheck_threads.submit(RecheckJob(self._context, new, self._end_recheck))

    def _end_recheck(self, checked: Sequence[LoadTarget]) -> None:
        with self._checked:
            self._rechecking.difference_update(target.expected.name for target in checked)
            self._checked.notify_all()

    def _wait_for_recheck(self, save: Save) -> None:
        """Wait until no block of the save is being rechecked: a wrong one would seem stored."""
        names = {content.name for content in save.contents}
        with self._checked:
            self._checked.wait_for(lambda: self._rechecking.isdisjoint(names), RECHECK_SECONDS)

    def _let_go(self, request_id: str) -> None:
        """Release the lease that was kept for a request, now or when its load has ended."""
        with self._lock:
            kept = self._kept.pop(request_id, None)
            loaded = kept is not None and kept.loaded
        if kept is not None and loaded:
            self._leases.release(kept.lease)

    def _post(self, event: TransferEvent) -> None:
        with self._lock:
            self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        if self._notify is not None:
            self._notify()
