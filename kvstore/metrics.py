"""The metrics of a store for Prometheus: what it holds, and counters since its start.

Each scrape reads one record under the store's lock. A worker's own view of its stores is among that
worker's metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.rpc.server.families import PREFIX as KVRELAY
from kvrelay.rpc.server.families import security
from kvstore.stats import DiskCounters, DiskStats, StoreCounters, StoreStats, TenantStats

PREFIX = KVRELAY + "kvstore_"

GAUGES = {
    "budget": ("budget_bytes", "Memory for blocks."),
    "bytes": ("bytes", "Bytes in use, reservations included."),
    "reserved_bytes": ("reserved_bytes", "Bytes reserved for blocks that are being put."),
    "leased_bytes": ("leased_bytes", "Bytes that cannot be evicted now."),
    "overhead_bytes": ("overhead_bytes", "Memory of the bookkeeping, not part of the budget."),
    "entries": ("blocks", "Blocks in memory."),
    "leases": ("leases", "Leases held by readers."),
    "reservations": ("reservations", "Blocks that are being put."),
}
"""A field of ``StoreStats``: the metric's name without its prefix, and its meaning."""

COUNTERS = {
    "lookups": ("lookups", "Lookups."),
    "hits": ("lookup_hits", "Blocks that lookups found."),
    "misses": ("lookup_misses", "Blocks that lookups did not find."),
    "served": ("served_blocks", "Blocks sent."),
    "absent": ("absent_blocks", "Blocks requested in vain."),
    "stored": ("stored_blocks", "Blocks stored."),
    "existed": ("existing_blocks", "Blocks put again, not copied."),
    "pending": ("pending_blocks", "Blocks put while another writer was putting them."),
    "rejected": ("rejected_blocks", "Blocks refused for lack of room."),
    "orphaned": ("orphaned_blocks", "Blocks refused because their parent is absent."),
    "corrupt": ("corrupt_blocks", "Blocks refused, or removed later, since they were damaged."),
    "abandoned": ("abandoned_reservations", "Reservations given up or expired."),
    "evicted": ("evicted_blocks", "Blocks evicted from memory."),
    "expired": ("expired_blocks", "Partial blocks past their lifetime."),
    "cleared": ("cleared_blocks", "Blocks removed by operators."),
    "bytes_in": ("received_bytes", "Bytes put."),
    "bytes_out": ("sent_bytes", "Bytes got."),
    "eviction_failures": ("eviction_failures", "Errors of the policy, which LRU replaced."),
    "hints_received": ("hints", "Blocks of hints."),
    "hints_refused": ("hints_refused", "Of these, refused: a bound was reached."),
    "hints_used": ("hints_used", "Of these, used while the hint held."),
    "hints_expired": ("hints_expired", "Of these, not used in time."),
    "hints_yielded": ("hints_yielded", "Of these, evicted nevertheless."),
}
"""As ``GAUGES``, for ``StoreCounters``."""

DISK_GAUGES = {
    "budget": ("budget_bytes", "Disk space for blocks."),
    "bytes": ("bytes", "Bytes of all files."),
    "entries": ("blocks", "Blocks on disk."),
    "unsaved": ("unsaved_blocks", "Blocks to be written."),
}
DISK_COUNTERS = {
    "written": ("written_blocks", "Blocks written."),
    "read": ("read_blocks", "Blocks brought back into memory."),
    "restored": ("restored_blocks", "Blocks found at the start."),
    "dropped": ("dropped_blocks", "Blocks removed for lack of room."),
    "skipped": ("skipped_blocks", "Blocks evicted before they were written, or too large."),
    "failed": ("failed_writes", "Writes that the system refused."),
    "corrupt": ("corrupt_blocks", "Blocks that were damaged on disk."),
    "damaged": ("damaged_blocks", "Incomplete records found at the start."),
    "bytes_written": ("written_bytes", "Bytes written."),
    "bytes_read": ("read_bytes", "Bytes read."),
}
TENANT_GAUGES = {
    "quota": ("quota_bytes", "Memory that a tenant may use."),
    "bytes": ("bytes", "Memory that it uses, bookkeeping included."),
    "entries": ("blocks", "Its blocks in memory."),
}

Record = StoreStats | StoreCounters | DiskStats | DiskCounters
Table = Mapping[str, tuple[str, str]]


class StoreCollector(Collector):
    """The metrics of what ``read`` returns. Without a disk tier there are none of a disk."""

    def __init__(self, read: Callable[[], StoreStats]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """All metrics of one reading."""
        stats = self._read()
        yield from _each(GaugeMetricFamily, PREFIX, stats, GAUGES)
        yield from _each(CounterMetricFamily, PREFIX, stats.counters, COUNTERS)
        if stats.disk is not None:
            prefix = PREFIX + "disk_"
            yield from _each(GaugeMetricFamily, prefix, stats.disk, DISK_GAUGES)
            yield from _each(CounterMetricFamily, prefix, stats.disk.counters, DISK_COUNTERS)
        yield from _tenants(stats.tenants)
        yield from security()


def _each(
    kind: type[CounterMetricFamily | GaugeMetricFamily], prefix: str, record: Record, table: Table
) -> Iterator[Metric]:
    for field, (name, text) in table.items():
        yield kind(prefix + name, text, getattr(record, field))


def _tenants(tenants: tuple[TenantStats, ...]) -> Iterator[Metric]:
    """Named tenants only: all that services hold is among the store's own figures."""
    named = [tenant for tenant in tenants if tenant.name]
    for field, (name, text) in TENANT_GAUGES.items() if named else ():
        family = GaugeMetricFamily(f"{PREFIX}tenant_{name}", text, labels=["tenant"])
        for tenant in named:
            family.add_metric([tenant.name], getattr(tenant, field))
        yield family


def registry_of(read: Callable[[], StoreStats]) -> CollectorRegistry:
    """All metrics of a store."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(read))
    return registry
