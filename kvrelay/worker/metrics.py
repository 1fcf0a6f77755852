"""The metrics of a worker for Prometheus, under vLLM's names where the meaning is the same.

Each scrape reads one frozen record, so the sums by source equal the prompt tokens in every scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.connector.counters import ConnectorCounters
from kvrelay.engine.core.updates import Ended
from kvrelay.engine.engine import EngineLoad
from kvrelay.rpc.server.families import (
    FIRST_TOKEN_SECONDS,
    PREFIX,
    STEP_TOKENS,
    TOKEN_SECONDS,
    TOKENS,
    histogram,
    labelled,
    security,
)
from kvrelay.usage import Miss
from kvrelay.worker.engines.opened import WorkerEngine

StoreReader = Callable[[], ConnectorCounters]


class WorkerHistograms:
    """Times of steps and legs in seconds, their sizes in positions, requests and tokens."""

    def __init__(self) -> None:
        self._step_seconds = histogram(
            "step_time_seconds", "Steps of the model runner.", TOKEN_SECONDS
        )
        self._step_positions = histogram(
            "iteration_tokens_total", "Positions computed in a step.", STEP_TOKENS
        )
        self._step_requests = histogram("step_requests", "Requests in a step.", STEP_TOKENS)
        self._queue = histogram(
            "leg_queue_time_seconds", "Until a leg was admitted.", FIRST_TOKEN_SECONDS
        )
        self._load = histogram(
            "leg_load_time_seconds",
            "From its admission until its KV was loaded.",
            FIRST_TOKEN_SECONDS,
        )
        self._prefill = histogram(
            "leg_prefill_time_seconds", "From then to its first token.", FIRST_TOKEN_SECONDS
        )
        self._length = histogram("leg_tokens", "Tokens that a leg started from.", TOKENS)
        self._computed = histogram(
            "leg_computed_tokens", "Of these, tokens whose KV was computed.", TOKENS
        )
        self._generated = histogram("leg_generation_tokens", "Tokens that it generated.", TOKENS)

    def step(self, seconds: float, requests: int, positions: int) -> None:
        """The model runner computed a step."""
        self._step_seconds.observe(seconds)
        self._step_requests.observe(requests)
        self._step_positions.observe(positions)

    def leg(self, ended: Ended) -> None:
        """A leg has sent its account."""
        tokens, timing = ended.tokens, ended.timing
        self._queue.observe(timing.queue)
        self._load.observe(timing.load)
        self._prefill.observe(timing.run)
        self._length.observe(tokens.length)
        self._computed.observe(tokens.computed)
        self._generated.observe(tokens.generated)

    def collect(self) -> Iterator[Metric]:
        """Every histogram."""
        for each in vars(self).values():
            yield from each.collect()


class WorkerCollector(Collector):
    """The metrics of one worker with its ``labels``; ``store`` reads the store connector's."""

    def __init__(
        self,
        engine: WorkerEngine,
        labels: Mapping[str, str],
        histograms: WorkerHistograms,
        store: StoreReader | None,
        has_store: bool,
    ) -> None:
        self._engine = engine
        self._labels = labels
        self._histograms = histograms
        self._store = store
        self._has_store = has_store

    def collect(self) -> Iterator[Metric]:
        """All metrics of one reading."""
        return labelled(self._unlabelled(), self._labels)

    def _unlabelled(self) -> Iterator[Metric]:
        load = self._engine.load()
        for name, text, value in gauges(load):
            yield GaugeMetricFamily(PREFIX + name, text, value)
        for name, text, value in counters(load, self._has_store):
            yield CounterMetricFamily(PREFIX + name, text, value)
        for name, text, label, values in counters_by_label(load):
            family = CounterMetricFamily(PREFIX + name, text, labels=[label])
            for key, value in values.items():
                family.add_metric([key], value)
            yield family
        if self._store is not None:
            yield from _store_metrics(self._store())
        yield from self._histograms.collect()
        yield from security()


def _store_metrics(read: ConnectorCounters) -> Iterator[Metric]:
    for each in fields(read):
        kind = GaugeMetricFamily if each.metadata["gauge"] else CounterMetricFamily
        name, text = each.metadata["metric"], each.metadata["text"]
        yield kind(PREFIX + name, text, getattr(read, each.name))


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
    asked = totals.asked if has_store else 0
    yield "external_prefix_cache_queries", "Tokens looked up in the store.", asked
    yield (
        "external_prefix_cache_hits",
        "Tokens loaded from the store and verified.",
        totals.external,
    )
    yield "recomputed_tokens", "Positions computed again after preemptions.", totals.recomputed
    yield "failed_load_tokens", "Tokens found in the store and not loaded.", totals.failed
    yield "late_load_tokens", "Tokens loaded for requests that had left.", totals.late
    yield "executed_positions", "Positions that the model runner computed.", load.executed
    yield "num_preemptions", "Preemptions.", totals.preemptions
    yield "late_events", "Events of residencies that had ended.", load.late_events
    yield "engine_steps", "Steps of the model.", load.steps


def counters_by_label(load: EngineLoad) -> Iterator[tuple[str, str, str, Mapping[str, float]]]:
    """Name, help, label, and the value for each value of the label."""
    totals = load.totals
    by_source = {
        "local_compute": totals.computed,
        "local_cache_hit": totals.local,
        "external_kv_transfer": totals.external,
    }
    missed = {miss.value: totals.missed.get(miss, 0) for miss in Miss}
    yield "prompt_tokens_by_source", "Prompt tokens by the source of their KV.", "source", by_source
    yield (
        "external_tokens_by_store",
        "Prompt tokens loaded and verified, by the store they came from.",
        "store",
        totals.sources,
    )
    yield "request_success", "Legs by finish reason.", "finished_reason", totals.finished
    yield (
        "missed_blocks",
        "Blocks looked up in the store and not loaded, by the reason of each leg's first.",
        "reason",
        missed,
    )


def registry_of(
    engine: WorkerEngine,
    labels: Mapping[str, str],
    histograms: WorkerHistograms,
    store: StoreReader | None = None,
    has_store: bool = True,
) -> CollectorRegistry:
    """All metrics of a worker. Without a store (``has_store``) the engine has looked nothing up."""
    registry = CollectorRegistry()
    registry.register(WorkerCollector(engine, labels, histograms, store, has_store))
    return registry
