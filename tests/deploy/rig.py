"""What routers, workers and stores really export, and the parts of PromQL that name it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from prometheus_client.core import Metric

from kvrelay.connector.counters import ConnectorCounters
from kvrelay.connector.mock import MockEnd, Script
from kvrelay.rpc.protocol import NAMES
from kvrelay.rpc.security import policy, renewal
from kvrelay.rpc.security.tls import TlsCredentials
from kvrelay.rpc.server import families
from kvrelay.usage import Miss
from kvrelay.worker import metrics as worker_metrics
from kvstore import metrics as store_metrics
from kvstore.limits import StoreLimits
from kvstore.server.block_store import BlockStore
from kvstore.stats import TenantStats
from router import metrics as router_metrics
from router.workers.health import HealthState
from tests.accounting.bench import limits
from tests.accounting.served import Served
from tests.router.fakes import decode_worker, prefill_worker, running

ROOT = Path(__file__).parents[2]
OBSERVABILITY = ROOT / "deploy" / "observability"
SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
}
TARGET_LABELS = frozenset({"instance", "job", "component"})
"""Labels of a scrape target: Prometheus and deploy/observability/targets set them."""

SCRAPED = ("up",)  # of Prometheus itself, for each target
VALUES: Mapping[str, frozenset[str]] = {
    "state": frozenset(state.name.lower() for state in HealthState),
    "role": frozenset(NAMES.values()),
    "reason": frozenset({*Miss, *router_metrics.REFUSALS}),
    "ended": frozenset(router_metrics.ENDS),
    "source": frozenset({"local_compute", "local_cache_hit", "external_kv_transfer"}),
    "component": frozenset({"router", "worker", "store"}),
    "result": frozenset(renewal.RESULTS),
}
"""The values of labels that have a fixed set of them."""

_SELECTOR = re.compile(r"\b(kvrelay:\w+|up\b)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")


@dataclass(frozen=True, slots=True)
class Exported:
    """The names of the series, with the labels of each."""

    labels: Mapping[str, frozenset[str]]

    def problems(self, query: str) -> Iterator[str]:
        """What a PromQL query names that no process exports."""
        known = set(TARGET_LABELS)
        for name, inside in _SELECTOR.findall(query):
            own = self._of(name)
            if own is None:
                yield f"no process exports {name}"
                continue
            known |= own
            for label, operator, value in _MATCHER.findall(inside):
                if label not in own | TARGET_LABELS:
                    yield f"{name} has no label {label}"
                elif label in VALUES and not _possible(label, operator, value):
                    yield f"{name} never has {label}{operator}{value}"
        for names in _GROUPING.findall(query):
            yield from (
                f"no series of the query has the label {label}"
                for label in re.findall(r"\w+", names)
                if label not in known
            )

    def _of(self, name: str) -> frozenset[str] | None:
        return frozenset() if name in SCRAPED else self.labels.get(name)


def _possible(label: str, operator: str, value: str) -> bool:
    """Whether each alternative that the matcher names is a value; variables stand for any."""
    if value.startswith("$"):
        return True
    parts = value.split("|") if "~" in operator else [re.escape(value)]
    return all(any(re.fullmatch(part, each) for each in VALUES[label]) for part in parts)


def metrics_named(query: str) -> list[str]:
    """The names of the series of a query."""
    return [name for name, _ in _SELECTOR.findall(query)]


async def exported() -> Exported:
    """Asks a router with two workers, a worker that served and a store with disk and tenants."""
    labels: dict[str, frozenset[str]] = {}
    async with running([prefill_worker(), decode_worker()]) as router:
        router.service.hints.counts["sent"] += 1
        labels |= _labels(router_metrics.registry_of(router.service).collect())
    labels |= _labels(_worker())
    store = BlockStore(StoreLimits(budget=1 << 20, disk_budget=1 << 20))
    stats = replace(store.stats(), tenants=(TenantStats("a", 1, 2, 3),))
    labels |= _labels(store_metrics.registry_of(lambda: stats).collect())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "_installed", policy.Security(TlsCredentials(None, expires=1.0)))
        labels |= _labels(families.labelled(families.security(), {"model_name": "m"}))
    return Exported(labels)


def _worker() -> list[Metric]:
    """The families of a worker that loaded tokens from a store and finished a request."""
    own = {"model_name": "m", "worker": "w", "role": "decode"}
    with Served(
        limits(40, 4, budget=16), Script(lookups={"*": [8]}, loads={"*": [MockEnd()]})
    ) as s:
        s.submit("a", range(20), 4)
        s.wait("a")
        registry = worker_metrics.registry_of(
            s.engine, own, worker_metrics.WorkerHistograms(), ConnectorCounters
        )
        return list(registry.collect())


def _labels(read: Iterable[Metric]) -> dict[str, frozenset[str]]:
    found = {}
    for family in read:
        assert family.samples, f"{family.name} has no sample to read labels from"
        for suffix in SUFFIXES[family.type]:
            name = family.name + suffix
            samples = [sample for sample in family.samples if sample.name == name]
            assert samples, f"{family.name} has no {name}"
            found[name] = frozenset().union(*(sample.labels for sample in samples))
    return found
