"""docs/metrics.md lists every metric of routers, workers and stores, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client.core import Metric

from kvrelay.cli.authority import CertificateAuthority
from kvrelay.connector.counters import ConnectorCounters
from kvrelay.connector.mock import Script
from kvrelay.rpc.security import policy
from kvrelay.rpc.server import families
from kvrelay.worker import metrics as worker_metrics
from kvstore import metrics as store_metrics
from kvstore.limits import StoreLimits
from kvstore.server.block_store import BlockStore
from router import latency
from router import metrics as router_metrics
from tests.accounting.bench import limits
from tests.accounting.served import Served
from tests.router.fakes import decode_worker, running
from tests.secured import write_files

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(\w+)`[^|]* \| (\w+) \| ([^|]+) \|", re.MULTILINE)


def listed(title: str) -> list[tuple[str, ...]]:
    """Name, type and meaning of every row under a title."""
    return ROW.findall(PAGE.read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0])


def described(exported: Iterable[Metric]) -> list[tuple[str, ...]]:
    """The same of what is exported."""
    return [
        (each.name.removeprefix("kvrelay:"), each.type, each.documentation.rstrip("."))
        for each in exported
    ]


def told(exported: Iterable[Metric]) -> list[tuple[str, ...]]:
    """Without what every process exports, of which one is not there without TLS."""
    *own, reloads, refusals = described(exported)
    assert [reloads, refusals] == listed("Every process")[1:]
    return own


def test_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = write_files(tmp_path, "own", CertificateAuthority()).options()
    monkeypatch.setattr(policy, "_installed", policy.load(options))
    assert described(families.security()) == listed("Every process")


async def test_the_router() -> None:
    async with running([decode_worker()]) as router:
        assert told(router_metrics.registry_of(router.service).collect()) == listed("Router")


@pytest.mark.parametrize("read", [None, ConnectorCounters])
def test_workers(read: type[ConnectorCounters] | None) -> None:
    with Served(limits(8, 4), Script()) as served:
        registry = worker_metrics.registry_of(
            served.engine, {}, worker_metrics.WorkerHistograms(), read
        )
        found = told(registry.collect())
    assert found == [
        row for row in listed("Workers") if read is not None or not row[0].startswith("store_")
    ]


def test_buckets_tell_milliseconds_apart() -> None:
    """All histograms of times but those that have vLLM's bounds for whole requests."""
    page = PAGE.read_text(encoding="utf-8")
    of_vllm = {
        f"kvrelay:{name}" for name in re.findall(r"^\| `(\w+)`.*\| same \|$", page, re.MULTILINE)
    }
    families = (
        *latency.RequestHistograms().collect(),
        *worker_metrics.WorkerHistograms().collect(),
    )
    own = [each for each in families if each.name.endswith("_seconds") and each.name not in of_vllm]
    assert len(own) == 6
    for family in own:
        bounds = [s.labels["le"] for s in family.samples if s.name.endswith("_bucket")]
        assert float(bounds[0]) == 0.001, family.name


def test_the_store() -> None:
    """With a disk tier; the rows of tenants come with credentials only."""
    store = BlockStore(StoreLimits(budget=1 << 20, disk_budget=1 << 20))
    found = told(store_metrics.registry_of(store.stats).collect())
    tenants = [
        (f"kvstore_tenant_{name}", "gauge", text.rstrip("."))
        for name, text in store_metrics.TENANT_GAUGES.values()
    ]
    assert found + tenants == listed("Store")
