"""The store's metrics for Prometheus."""

from __future__ import annotations

import urllib.request
from dataclasses import fields

from prometheus_client import CollectorRegistry

from kvrelay.cluster.ports import free_ports
from kvstore.client.connect import connect
from kvstore.metrics import (
    COUNTERS,
    DISK_COUNTERS,
    DISK_GAUGES,
    GAUGES,
    PREFIX,
    TENANT_GAUGES,
    registry_of,
)
from kvstore.stats import DiskCounters, DiskStats, StoreCounters, StoreStats, TenantStats
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.rig import get, make, put


def names(record: type, *without: str) -> set[str]:
    """The fields of a record."""
    return {field.name for field in fields(record)} - {*without}


def reading(**changed: object) -> StoreStats:
    """A reading in which every figure is another number."""
    counters = StoreCounters(*range(101, 101 + len(fields(StoreCounters))))
    given = dict.fromkeys(names(StoreStats), 0) | {
        name: value for value, name in enumerate(GAUGES, 1)
    }
    optional = {"boot": b"boot", "counters": counters, "disk": None, "tenants": ()}
    return StoreStats(**{**given, **optional, **changed})  # type: ignore[arg-type]


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(PREFIX + name, labels)


def test_every_figure_has_a_metric() -> None:
    assert names(StoreStats, "boot", "counters", "disk", "eviction", "tenants") == GAUGES.keys()
    assert names(StoreCounters) == COUNTERS.keys()
    assert names(DiskStats, "counters") == DISK_GAUGES.keys()
    assert names(DiskCounters) == DISK_COUNTERS.keys()
    assert names(TenantStats, "name") == TENANT_GAUGES.keys()
    for table in (GAUGES | COUNTERS, DISK_GAUGES | DISK_COUNTERS):
        assert len({name for name, _ in table.values()}) == len(table)


def test_each_metric_has_the_figure_of_its_field() -> None:
    stats = reading()
    page = registry_of(lambda: stats)
    for field, (name, _) in GAUGES.items():
        assert value(page, name) == getattr(stats, field) > 0
    for field, (name, _) in COUNTERS.items():
        assert value(page, f"{name}_total") == getattr(stats.counters, field) > 100
    assert value(page, "disk_blocks") is None


def test_disk_and_tenants() -> None:
    disk = DiskStats(1, 2, 3, 4, DiskCounters(*range(11, 21)))
    tenants = TenantStats("", 1, 2, 3), TenantStats("a", 4, 5, 6), TenantStats("b", 7, 8, 9)
    page = registry_of(lambda: reading(disk=disk, tenants=tenants))
    assert value(page, "disk_unsaved_blocks") == 4
    assert value(page, "disk_read_bytes_total") == 20
    assert value(page, "tenant_bytes", tenant="b") == 9
    assert value(page, "tenant_quota_bytes", tenant="a") == 4
    assert value(page, "tenant_blocks", tenant="") is None


def test_a_process_serves_its_page() -> None:
    (port,) = free_ports(1)
    process, url = start_service("--metrics-port", str(port), "--budget", "2MiB")
    try:
        store = connect(url)
        block = make()
        put(store, block)
        get(store, block, make())
        store.close()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            page = answer.read().decode()
    finally:
        stop(process)
    expected = ("blocks 1.0", "budget_bytes 2.097152e+06", "stored_blocks_total 1.0")
    for line in (*expected, "served_blocks_total 1.0", "absent_blocks_total 1.0"):
        assert f"\n{PREFIX}{line}\n" in page
