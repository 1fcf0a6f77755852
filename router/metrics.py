"""The router's metrics for Prometheus: its requests, its queue, its retries, its workers.

Every value is read from its owner at the moment of a scrape; ``kvrelay top`` shows the same ones.
What a worker does with its legs is among that worker's own metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from kvrelay.rpc.protocol import ROLES, role_name
from kvrelay.rpc.server import families
from kvrelay.v1 import router_pb2
from router.generate.retry import RetryKind
from router.service import RouterService

PREFIX = families.PREFIX + "router_"

ENDS = (
    *("finished", "cancelled", "invalid_argument", "not_found", "failed_precondition"),
    *("resource_exhausted", "unavailable", "deadline_exceeded", "data_loss", "internal"),
)
REFUSALS = (
    *("evicted", "queue_full", "timed_out", "too_late", "too_many"),
    *("tenant_requests", "tenant_tokens"),
)
"""They are on the page from the start, at zero: ``rate`` does not see a counter's first sample."""


class RouterCollector(Collector):
    """The metrics of one router."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Every metric, labelled with the model's name."""
        labels = {"model_name": self._service.config.model_name}
        return families.labelled(self._unlabelled(), labels)

    def _unlabelled(self) -> Iterator[Metric]:
        service = self._service
        for name, text, value in queue(service.queue_status()):
            yield GaugeMetricFamily(PREFIX + name, text, value)
        yield _counted("requests", "Requests by how they ended.", "ended", service.ended, ENDS)
        yield _counted(
            "refused_requests",
            "Requests refused, to be sent again later.",
            "reason",
            service.refused,
            REFUSALS,
        )
        retry, placer = service.retry, service.placer
        nexts = tuple(kind.name.lower() for kind in RetryKind)
        yield _counted(
            "retried_legs", "Legs that failed and were retried.", "next", retry.retried, nexts
        )
        yield CounterMetricFamily(
            PREFIX + "migrations",
            "Of these, legs of a request whose client had tokens already.",
            retry.migrations,
        )
        yield CounterMetricFamily(
            PREFIX + "mixed_numerics_legs",
            "Legs that continued a stream on a worker of another numeric profile.",
            placer.mixed_numerics,
        )
        yield _counted(
            "hints", "Hints for the store, by whether it took them.", "result", service.hints.counts
        )
        relayed = service.totals.generation_tokens
        yield CounterMetricFamily(PREFIX + "generation_tokens", "Tokens relayed.", relayed)
        yield SummaryMetricFamily(
            PREFIX + "decision_seconds",
            "Time to choose a worker.",
            placer.decisions,
            placer.decision_seconds,
        )
        yield _counted(
            "lost_workers",
            "Workers in use that died or hung.",
            "role",
            service.registry.lost,
            tuple(ROLES),
        )
        yield self._in_flight()
        yield from service.latency.collect()
        yield from families.security()

    def _in_flight(self) -> Metric:
        family = GaugeMetricFamily(
            PREFIX + "worker_in_flight",
            "Legs that this router has on a worker.",
            labels=["worker", "role", "state"],
        )
        for worker in self._service.registry.workers:
            name = router_pb2.WorkerState.Name(worker.health.state.value)
            state = name.removeprefix("WORKER_STATE_").lower()
            family.add_metric([worker.address, role_name(worker.role), state], worker.legs)
        return family


def queue(status: router_pb2.QueueStatus) -> Iterator[tuple[str, str, float]]:
    """Name, help and value of each gauge."""
    yield "running_requests", "Requests that run.", status.running
    yield "slots", "Requests that may run.", status.slots
    yield "waiting_requests", "Requests that wait for a slot.", status.waiting
    yield "waiting_tokens", "The most tokens that these can need.", status.waiting_tokens
    yield "drained_tokens_per_second", "How fast the queue drains.", status.tokens_per_second


def _counted(
    name: str, text: str, label: str, counts: Mapping[str, int], always: Sequence[str] = ()
) -> Metric:
    """A counter by one label; the values ``always`` are there although nothing was counted."""
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for key, count in {**dict.fromkeys(always, 0), **counts}.items():
        family.add_metric([key], count)
    return family


def registry_of(service: RouterService) -> CollectorRegistry:
    """All metrics of a router."""
    registry = CollectorRegistry()
    registry.register(RouterCollector(service))
    return registry
