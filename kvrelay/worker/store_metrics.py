"""What the store connector of a worker counts, for Prometheus; blocks unless a name says else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.connector.counters import ConnectorCounters

# Field of ``ConnectorCounters``, name of the metric, help.
COUNTED = (
    ("lookups", "store_lookups", "Lookups asked of the store."),
    ("lookup_hits", "store_lookup_hits", "Lookups that found something."),
    ("lookup_failures", "store_lookup_failures", "Lookups without an answer in time."),
    ("lookup_tokens", "store_lookup_tokens", "Tokens that lookups found, not verified yet."),
    ("loads", "store_loads", "Loads from the store."),
    ("load_failures", "store_load_failures", "Loads ended by an error or their deadline."),
    ("loads_short", "store_loads_short", "Loads that gave less than was ordered."),
    ("loaded_tokens", "store_loaded_tokens", "Tokens loaded and verified."),
    ("loaded_bytes", "store_loaded_bytes", "Bytes loaded and verified."),
    ("absent", "store_absent_blocks", "Blocks promised by a lookup and not there for the load."),
    ("corrupt", "store_corrupt_blocks", "Blocks that failed verification."),
    ("saves", "store_saves", "Saves to the store."),
    ("save_failures", "store_save_failures", "Saves ended by an error or their deadline."),
    ("saves_dropped", "store_saves_dropped", "Saves dropped because too much was waiting."),
    ("saved_blocks", "store_saved_blocks", "Blocks written."),
    ("existing_blocks", "store_existing_blocks", "Blocks offered that the store had already."),
    ("refused_blocks", "store_refused_blocks", "Blocks offered that the store did not take."),
    ("saved_bytes", "store_saved_bytes", "Bytes written."),
    ("crashes", "store_job_crashes", "Jobs ended by a bug; the log has the traceback."),
)
MEASURED = (
    ("open_lookups", "store_lookups_open", "Lookups under way."),
    ("open_loads", "store_loads_open", "Loads under way."),
    ("open_saves", "store_saves_open", "Saves under way."),
    ("open_save_bytes", "store_save_bytes_open", "Bytes of the saves under way."),
    ("open_leases", "store_leases_open", "Leases held."),
)


class StoreCollector(Collector):
    """All of one reading, labelled with the worker's role."""

    def __init__(self, read: Callable[[], ConnectorCounters], role: str, prefix: str) -> None:
        self._read = read
        self._role = role
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """Every metric, of one moment."""
        counters = self._read()
        for field, name, text in COUNTED:
            counter = CounterMetricFamily(self._prefix + name, text, labels=["role"])
            counter.add_metric([self._role], getattr(counters, field))
            yield counter
        for field, name, text in MEASURED:
            gauge = GaugeMetricFamily(self._prefix + name, text, labels=["role"])
            gauge.add_metric([self._role], getattr(counters, field))
            yield gauge
