"""External KV in a block store: the ``Connector`` that workers use.

Calls return at once; lookups, loads and saves run on threads of their own kind, so that none of
them waits for another kind. A store that fails is a store that has nothing: work goes on without.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from typing import Protocol

from kvrelay.block import Namer, Namespace
from kvrelay.connector.counters import ConnectorCounters, Meter
from kvrelay.connector.geometry import Geometry, PayloadShape
from kvrelay.connector.leases import HeldLeases
from kvrelay.connector.loading import LoadJob, Pool, load_targets
from kvrelay.connector.lookups import Lookups
from kvrelay.connector.options import ConnectorOptions
from kvrelay.connector.saving import SaveJob
from kvrelay.connector.thread_pool import ThreadPool
from kvrelay.engine.core.external import Load, Query, Save, Saved, TransferEvent
from kvrelay.usage import Miss
from kvstore import Store

JOIN_SECONDS = 5.0


class ShapedPool(Pool, Protocol):
    """The worker's pool."""

    @property
    def shape(self) -> PayloadShape: ...


class StoreConnector:
    """A ``Connector`` over ``store``, which it closes when it is closed itself."""

    def __init__(
        self,
        store: Store,
        namer: Namer,
        namespace: Namespace,
        pool: ShapedPool,
        options: ConnectorOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._pool = pool
        self._options = chosen = options or ConnectorOptions()
        self._meter = meter = Meter()
        self._geometry = Geometry(namer, namespace, pool.shape)
        self._asks = self._lane("store-lookup", chosen.lookup_threads)
        self._loads = self._lane("store-load", chosen.load_threads)
        self._saves = [self._lane(f"store-save-{n}", 1) for n in range(chosen.save_threads)]
        self._returns = self._lane("store-release", 1)
        self._leases = HeldLeases(store, self._returns, meter)
        self._lookups = Lookups(
            store, self._geometry, self._asks, self._leases, meter, chosen, clock, self._news
        )
        self._lock = threading.Lock()
        self._events: list[TransferEvent] = []
        self._notify: Callable[[], None] = _nobody

    @property
    def counters(self) -> ConnectorCounters:
        """What was done so far and what is under way."""
        return self._meter.reading

    def start(self, notify: Callable[[], None]) -> None:
        """As the protocol says."""
        self._notify = notify
        for lane in self._lanes():
            lane.start()

    def lookup(self, query: Query) -> int | None:
        """As the protocol says; ``None`` at most as long as a lookup may take."""
        return self._lookups.find(query)

    def why(self, request_id: str) -> Miss | None:
        """As the protocol says."""
        return self._lookups.why(request_id)

    def load(self, load: Load) -> None:
        """As the protocol says. The lookup's answer and lease end with the load."""
        answer = self._lookups.take(load.request_id)
        lease = None if answer is None else answer.lease
        parts = load_targets(load, answer, self._geometry.of(load.space))

        def end(event: TransferEvent) -> None:
            self._leases.give_back(lease)
            self._post(event)

        self._meter.add(loads=1, open_loads=1)
        self._loads.submit(
            LoadJob(
                load,
                parts,
                self._store,
                self._pool,
                self._geometry.block_size,
                self._options,
                self._meter,
                end,
            )
        )

    def save(self, save: Save) -> None:
        """As the protocol says. Too much waiting: the save is dropped at once.

        A request that saves has been admitted: if it has not loaded what was found for it, it never
        will, and the lease goes back.
        """
        self._lookups.release(save.request_id)
        saving = SaveJob(
            save,
            self._store,
            self._pool,
            self._geometry.of(save.space),
            self._options,
            self._meter,
            self._post,
        )
        waiting = self._meter.reading.open_save_bytes
        if waiting and waiting + saving.nbytes > self._options.max_pending_save_bytes:
            self._meter.add(saves=1, saves_dropped=1)
            self._post(Saved(save.request_id, save.epoch, save.serial, 0))
            return
        self._meter.add(saves=1, open_saves=1, open_save_bytes=saving.nbytes)
        # One lane for all saves of a request keeps them in order.
        lane = zlib.crc32(save.request_id.encode()) % len(self._saves)
        self._saves[lane].submit(saving)

    def release(self, request_id: str) -> None:
        """As the protocol says."""
        self._lookups.release(request_id)

    def poll(self) -> list[TransferEvent]:
        """As the protocol says."""
        with self._lock:
            events = self._events
            self._events = []
        return events

    def close(self) -> None:
        """As the protocol says. Closing the store ends the calls under way."""
        self._lookups.close()
        for lane in self._lanes()[:-1]:
            lane.close()
        self._leases.run()
        self._returns.close()
        self._store.close()
        for lane in self._lanes():
            lane.join(JOIN_SECONDS)

    def _lane(self, name: str, threads: int) -> ThreadPool:
        return ThreadPool(name, threads, lambda: self._meter.add(crashes=1))

    def _lanes(self) -> list[ThreadPool]:
        return [self._asks, self._loads, *self._saves, self._returns]

    def _post(self, event: TransferEvent) -> None:
        with self._lock:
            self._events.append(event)
        self._news()

    def _news(self) -> None:
        self._notify()


def _nobody() -> None:
    """Stands for ``notify`` before ``start``."""
