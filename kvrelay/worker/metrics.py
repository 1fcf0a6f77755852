"""The metrics of a worker for Prometheus, under vLLM's names where the meaning is the same.

Each scrape reads one frozen record, so the sums by source equal the prompt tokens in every scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.connector.counters import ConnectorCounters
from kvrelay.engine.engine import Engine, EngineLoad
from kvrelay.usage import Miss

PREFIX = "kvrelay:"

# Field of ``ConnectorCounters``, name of the metric, help.
COUNTED = (
    ("lookups", "store_lookups", "Lookups sent to the store."),
    ("lookup_hits", "store_lookup_hits", "Lookups that found blocks."),
    ("lookup_failures", "store_lookup_failures", "Lookups without an answer in time."),
    ("lookup_tokens", "store_lookup_tokens", "Tokens that lookups found, not verified yet."),
    ("loads", "store_loads", "Loads from the store."),
    ("load_failures", "store_load_failures", "Loads ended by an error or their deadline."),
    ("loads_short", "store_loads_short", "Loads that gave fewer tokens than ordered."),
    ("loaded_tokens", "store_loaded_tokens", "Tokens loaded and verified."),
    ("loaded_bytes", "store_loaded_bytes", "Bytes loaded and verified."),
    ("absent", "store_absent_blocks", "Blocks that a lookup found and the load did not."),
    ("corrupt", "store_corrupt_blocks", "Blocks that failed verification."),
    ("saves", "store_saves", "Saves to the store."),
    ("save_failures", "store_save_failures", "Saves ended by an error or their deadline."),
    ("saves_dropped", "store_saves_dropped", "Saves dropped because too many bytes were waiting."),
    ("saved_blocks", "store_saved_blocks", "Blocks written."),
    ("existing_blocks", "store_existing_blocks", "Blocks offered that the store had already."),
    ("refused_blocks", "store_refused_blocks", "Blocks offered that the store refused."),
    ("saved_bytes", "store_saved_bytes", "Bytes written."),
    ("crashes", "store_job_crashes", "Jobs ended by a bug; the log has the traceback."),
)
MEASURED = (
    ("open_lookups", "store_lookups_open", "Open lookups."),
    ("open_loads", "store_loads_open", "Open loads."),
    ("open_saves", "store_saves_open", "Open saves."),
    ("open_save_bytes", "store_save_bytes_open", "Bytes of the open saves."),
    ("open_leases", "store_leases_open", "Leases held."),
)


class EngineCollector(Collector):
    """The metrics of one engine, labelled with the worker's role.

    Without a store (``has_store``) the engine has looked nothing up.
    """

    def __init__(self, engine: Engine, role: str, has_store: bool = True) -> None:
        self._engine = engine
        self._role = role
        self._has_store = has_store

    def collect(self) -> Iterator[Metric]:
        """All metrics of one reading."""
        load = self._engine.load()
        for name, text, value in gauges(load):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["role"])
            gauge.add_metric([self._role], value)
            yield gauge
        for name, text, value in counters(load, self._has_store):
            counter = CounterMetricFamily(PREFIX + name, text, labels=["role"])
            counter.add_metric([self._role], value)
            yield counter
        yield self._by_source(load)
        yield self._by_store(load)
        yield self._finished(load)
        yield self._missed(load)

    def _by_source(self, load: EngineLoad) -> Metric:
        totals = load.totals
        family = CounterMetricFamily(
            PREFIX + "prompt_tokens_by_source",
            "Prompt tokens by the source of their KV.",
            labels=["role", "source"],
        )
        for source, value in (
            ("local_compute", totals.computed),
            ("local_cache_hit", totals.local),
            ("external_kv_transfer", totals.external),
        ):
            family.add_metric([self._role, source], value)
        return family

    def _by_store(self, load: EngineLoad) -> Metric:
        family = CounterMetricFamily(
            PREFIX + "external_tokens_by_store",
            "Prompt tokens loaded and verified, by the store they came from.",
            labels=["role", "store"],
        )
        for store, value in load.totals.sources.items():
            family.add_metric([self._role, store], value)
        return family

    def _finished(self, load: EngineLoad) -> Metric:
        family = CounterMetricFamily(
            PREFIX + "request_success",
            "Legs by finish reason.",
            labels=["role", "finished_reason"],
        )
        for reason, value in load.totals.finished.items():
            family.add_metric([self._role, reason], value)
        return family

    def _missed(self, load: EngineLoad) -> Metric:
        family = CounterMetricFamily(
            PREFIX + "missed_blocks",
            "Blocks looked up in the store and not loaded, by the reason of each leg's first.",
            labels=["role", "reason"],
        )
        for miss in Miss:
            family.add_metric([self._role, miss.value], load.totals.missed.get(miss, 0))
        return family


def gauges(load: EngineLoad) -> Iterator[tuple[str, str, float]]:
    """Name, help and value of the gauges."""
    blocks = load.held_blocks + load.free_blocks
    yield "num_requests_running", "Requests that compute.", load.running
    yield "num_requests_waiting", "Requests that wait for room.", load.waiting
    yield "num_requests_loading", "Requests whose KV is being loaded.", load.loading
    yield "num_saves_open", "Open saves.", load.saving
    yield "kv_cache_usage_perc", "Blocks held, 1 is all of them.", load.held_blocks / blocks


def counters(load: EngineLoad, has_store: bool) -> Iterator[tuple[str, str, float]]:
    """Name, help and value of the counters; they count tokens unless the name says otherwise."""
    totals = load.totals
    yield "prompt_tokens", "Tokens that legs started from.", totals.prompt
    yield "generation_tokens", "Tokens generated.", totals.generated
    yield "prefix_cache_queries", "Tokens looked up in the local prefix cache.", totals.prompt
    yield "prefix_cache_hits", "Tokens found in the local prefix cache.", totals.local
    asked = totals.prompt - totals.local if has_store else 0
    yield "external_prefix_cache_queries", "Tokens looked up in the store.", asked
    yield (
        "external_prefix_cache_hits",
        "Tokens loaded from the store and verified.",
        totals.external,
    )
    yield "recomputed_tokens", "Positions computed again after preemptions.", totals.recomputed
    yield (
        "failed_load_tokens",
        "Tokens found in the store and not loaded.",
        totals.failed,
    )
    yield "late_load_tokens", "Tokens loaded for requests that had left.", totals.late
    yield "executed_positions", "Positions that the model runner computed.", load.executed
    yield "num_preemptions", "Preemptions.", totals.preemptions
    yield "late_events", "Events of residencies that had ended.", load.late_events
    yield "engine_steps", "Steps of the model.", load.steps


class StoreCollector(Collector):
    """The metrics of one store connector, labelled with the worker's role."""

    def __init__(self, read: Callable[[], ConnectorCounters], role: str) -> None:
        self._read = read
        self._role = role

    def collect(self) -> Iterator[Metric]:
        """All metrics of one reading."""
        counters = self._read()
        for field, name, text in COUNTED:
            counter = CounterMetricFamily(PREFIX + name, text, labels=["role"])
            counter.add_metric([self._role], getattr(counters, field))
            yield counter
        for field, name, text in MEASURED:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["role"])
            gauge.add_metric([self._role], getattr(counters, field))
            yield gauge


def registry_of(
    engine: Engine,
    role: str,
    store: Callable[[], ConnectorCounters] | None = None,
    has_store: bool = True,
) -> CollectorRegistry:
    """All metrics of a worker; ``store`` reads the counters of its store connector."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, role, has_store))
    if store is not None:
        registry.register(StoreCollector(store, role))
    return registry
