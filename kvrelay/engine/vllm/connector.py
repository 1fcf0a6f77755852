"""``KvrelayConnector``: a verified, shared store of KV blocks for vLLM 0.32.

    --kv-transfer-config '{"kv_connector": "KvrelayConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "kvrelay.engine.vllm.connector",
      "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"store": "kvrelay://127.0.0.1:50050"}}'

vLLM makes one for its scheduler and one for each rank; this class hands the calls on to
``SchedulerSide`` and ``WorkerSide``. Loads are asynchronous: no one reads a block before it was
verified. docs/vllm.md says what is exact under which conditions.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import vllm
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention

from kvrelay.connector.counters import ConnectorCounters
from kvrelay.engine.vllm.kv.account import LegListener, RequestAccount
from kvrelay.engine.vllm.kv.facts import view_of
from kvrelay.engine.vllm.kv.metrics import CounterDeltas, add_changes, described
from kvrelay.engine.vllm.kv.orders import RankReports, StepOrders
from kvrelay.engine.vllm.kv.profile import attention_of, numeric_profile
from kvrelay.engine.vllm.kv.scheduler_side import SchedulerSide
from kvrelay.engine.vllm.kv.setup import Setup
from kvrelay.engine.vllm.kv.worker_side import WorkerSide
from kvrelay.process.cores import threads_on_the_cores_of_the_creator
from kvrelay.process.parent import die_with_parent, end_with_creator

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvrelay.engine.core.audit import Finding
    from kvrelay.engine.vllm.kv.border import (
        VllmBlocks,
        VllmCacheManager,
        VllmRequest,
        VllmStep,
    )

ENGINE_PROCESS = "EngineCore"
"""What vLLM calls the process that it makes for its scheduler."""

KVConnectorMetadata.register(StepOrders)

log = logging.getLogger("kvrelay.vllm")


class KvrelayStats(KVConnectorStats):  # type: ignore[misc]
    """What was added to the counters since the last step, by name, in ``data``."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KvrelayStats) -> KvrelayStats:
        return KvrelayStats(data=add_changes(self.data, other.data))

    def reduce(self) -> dict[str, int]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KvrelayPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counters on vLLM's metrics page."""

    def __init__(
        self,
        vllm_config: object,
        metric_types: Mapping[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series = {}
        for field, (name, text, gauge) in described().items():
            kind = self._gauge_cls if gauge else self._counter_cls
            family = kind(name=f"kvrelay:{name}", documentation=text, labelnames=labelnames)
            for engine, labels in per_engine_labelvalues.items():
                self._series[engine, field] = family.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, int], engine_idx: int = 0) -> None:
        for field, change in transfer_stats_data.items():
            self._series[engine_idx, field].inc(change)


class RankReportsMessage(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The reports of one rank, which vLLM merges with those of the others."""

    def __init__(self, reports: RankReports) -> None:
        self.reports = reports

    def aggregate(self, other: RankReportsMessage) -> RankReportsMessage:
        self.reports.add(other.reports)
        return self


class KvrelayConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """One role of the connector; see the module."""

    def __init__(self, vllm_config, role, kv_cache_config) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        super().__init__(vllm_config, role, kv_cache_config)
        self._setup = Setup(
            view_of(vllm_config, kv_cache_config, vllm.__version__, partial(_numerics, vllm_config))
        )
        self._deltas = CounterDeltas()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._on_host = False
        if role == KVConnectorRole.WORKER and vllm_config.parallel_config.world_size > 1:
            die_with_parent(os.getppid())  # a rank holds its device for as long as it runs
        if role == KVConnectorRole.SCHEDULER:
            if multiprocessing.current_process().name.startswith(ENGINE_PROCESS):
                end_with_creator()  # vLLM 0.32's engine outlives a killed API server
            self._scheduler = self._setup.scheduler_side()

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: a save that is lost is a later miss

    # --- rank -----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        names = self._setup.layer_names
        self._on_host = all(cache.device.type == "cpu" for cache in kv_caches.values())
        layers = get_layers_from_vllm_config(self._vllm_config, Attention, names)
        with threads_on_the_cores_of_the_creator():
            self._worker = self._setup.worker_side(
                [layers[name] for name in names],
                [kv_caches[name] for name in names],
                get_tensor_model_parallel_rank(),
            )

    def bind_connector_metadata(self, connector_metadata: StepOrders) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and self._on_host:
            self._worker.load(connector_metadata)  # vLLM would start them after the step

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        if self._worker is not None and not self._on_host:
            self._worker.load(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: object
    ) -> None:
        return

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        return None, self._worker.take_loaded(self._orders().idle) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_invalid()

    def build_connector_worker_meta(self) -> RankReportsMessage | None:
        reports = None if self._worker is None else self._worker.take_reports()
        return None if reports is None else RankReportsMessage(reports)

    def _orders(self) -> StepOrders:
        orders: StepOrders = self._get_connector_metadata()
        return orders

    # --- scheduler ------------------------------------------------------------------------------

    @property
    def side(self) -> SchedulerSide:
        """The scheduler's side; only the connector of that role has one."""
        if self._scheduler is None:
            raise RuntimeError("this connector is that of a rank")
        return self._scheduler

    @property
    def listener(self) -> LegListener | None:
        """Who is told of admissions and ends."""
        return self.side.listener

    @listener.setter
    def listener(self, listener: LegListener | None) -> None:
        self.side.listener = listener

    @property
    def counters(self) -> ConnectorCounters:
        """The counters of this role."""
        if self._scheduler is not None:
            return self._scheduler.counters
        return ConnectorCounters() if self._worker is None else self._worker.counters

    def account(self, request_id: str, saves: bool = True) -> RequestAccount | None:
        """See ``SchedulerSide.account``."""
        return self.side.account(request_id, saves)

    def audit(self) -> Sequence[Finding]:
        """The invariants that are broken now, between two steps."""
        return self.side.audit()

    def bind_kv_cache_manager(self, kv_cache_manager: VllmCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.side.bind(kv_cache_manager)

    def reset_cache(self) -> bool:
        """vLLM asks for it after weights were changed: the names of the blocks do not show that."""
        log.warning(
            "the store keeps this model's blocks: for other weights start vLLM again, with another"
            ' "namespace": {"revision": ...}'
        )
        return False

    def on_new_request(self, request: VllmRequest) -> None:
        self.side.add(request)

    def get_num_new_matched_tokens(
        self, request: VllmRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found = self.side.look_up(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(
        self, request: VllmRequest, blocks: VllmBlocks, num_external_tokens: int
    ) -> None:
        self.side.allocate(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: VllmStep) -> StepOrders:
        return self.side.step(scheduler_output)

    def update_connector_output(self, connector_output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        message = connector_output.kv_connector_worker_meta
        if isinstance(message, RankReportsMessage):
            self.side.report(message.reports)

    def request_finished(
        self, request: VllmRequest, block_ids: list[int]
    ) -> tuple[bool, dict[str, object] | None]:
        return False, {"kvrelay": self.side.finish(request).numbers()}

    def has_pending_push_work(self) -> bool:
        return self.side.busy

    def take_events(self) -> Iterable[object]:
        return ()

    # --- both -----------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KvrelayStats | None:
        changes = self._deltas.take(self.counters)
        if self._scheduler is not None:
            changes = add_changes(changes, self._scheduler.take_account_changes())
        return KvrelayStats(data=changes) if changes else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, int] | None = None) -> KvrelayStats:
        return KvrelayStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: object,
        metric_types: Mapping[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvrelayPromMetrics:
        return KvrelayPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()


def _numerics(config: VllmConfig) -> str:
    return numeric_profile(config, attention_of(config))
