"""The connector's part in a rank's model runner: loads into vLLM's pages and saves from them.

Both run on the threads of the native engine's store connector, with its checks: a block counts once
its tokens, its checksum and, with a fleet key, its tags are right.
"""

from __future__ import annotations

import threading

from kvrelay.connector.counters import ConnectorCounters
from kvrelay.connector.store import StoreConnector
from kvrelay.engine.core.external import Load, Loaded, Save
from kvrelay.engine.vllm.kv.orders import LoadOrder, LoadReport, RankReports, SaveReport, StepOrders
from kvrelay.engine.vllm.kv.pages import PageMemory


class WorkerSide:
    """One rank's transfers; ``patience`` seconds may pass in a step that computes nothing."""

    def __init__(
        self, store: StoreConnector, pages: PageMemory, shard: int, patience: float
    ) -> None:
        self._store = store
        self._pages = pages
        self._shard = shard
        self._patience = patience
        self._loading: dict[tuple[str, int], LoadOrder] = {}
        self._open_saves = 0
        self._invalid: set[int] = set()
        self._reports = RankReports()
        self._news = threading.Event()
        store.start(self._news.set)

    @property
    def counters(self) -> ConnectorCounters:
        """The store connector's counters."""
        return self._store.counters

    def load(self, orders: StepOrders) -> None:
        """Start the loads of a step."""
        for order in orders.loads:
            self._loading[order.request_id, order.epoch] = order
            load = Load(
                order.request_id, order.epoch, order.local, order.external, (), (), order.blocks
            )
            self._store.fetch(load, order.targets[self._shard])

    def save(self, orders: StepOrders) -> None:
        """The step has been computed, or launched on a device: start its saves."""
        if orders.saves:
            self._pages.computed()
        for order in orders.saves:
            contents = order.contents[self._shard]
            self._open_saves += 1
            self._store.save(
                Save(order.request_id, order.epoch, order.serial, contents, order.space)
            )

    def take_loaded(self, idle: bool) -> set[str]:
        """The requests whose loads have ended; waits a moment if vLLM has nothing else to do.

        Idle steps that did not wait would spin, and hold up the threads that save.
        """
        if idle and (self._loading or self._open_saves):
            self._news.wait(self._patience)
        self._news.clear()
        done: set[str] = set()
        for event in self._store.poll():
            if not isinstance(event, Loaded):
                key = (event.request_id, event.epoch, event.serial)
                self._reports.add(RankReports(saves={key: SaveReport(event.stored)}))
                self._open_saves -= 1
                continue
            order = self._loading.pop((event.request_id, event.epoch))
            valid = min(max(event.valid, 0), order.external)
            if valid < order.external:
                self._invalid.update(order.blocks[valid // self._pages.shape.block_size :])
            report = LoadReport(valid, event.missed, event.sources)
            self._reports.add(RankReports({(event.request_id, event.epoch): report}))
            done.add(event.request_id)
        return done

    def take_invalid(self) -> set[int]:
        """The blocks that loads left unfilled since the last call."""
        invalid = self._invalid
        self._invalid = set()
        return invalid

    def take_reports(self) -> RankReports | None:
        """What ended since the last call; ``None`` if nothing did."""
        reports = self._reports
        self._reports = RankReports()
        return reports if reports else None

    def close(self) -> None:
        """Close the store."""
        self._store.close()
