"""The counters of a store connector, each with the name and help of its metric."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace


def counter(metric: str, text: str, gauge: bool = False) -> int:
    """A field that starts at zero; a ``gauge`` may fall again."""
    shown = {"metric": metric, "text": text, "gauge": gauge}
    number: int = field(default=0, metadata=shown)
    return number


@dataclass(frozen=True, slots=True)
class ConnectorCounters:
    """Counts since the start, and how much is open now. A failed lookup counts as no tokens."""

    lookups: int = counter("store_lookups", "Lookups sent to the store.")
    lookup_hits: int = counter("store_lookup_hits", "Lookups that found blocks.")
    lookup_failures: int = counter("store_lookup_failures", "Lookups without an answer in time.")
    lookup_tokens: int = counter(
        "store_lookup_tokens", "Tokens that lookups found, not verified yet."
    )
    loads: int = counter("store_loads", "Loads from the store.")
    load_failures: int = counter(
        "store_load_failures", "Loads ended by an error or their deadline."
    )
    loads_short: int = counter("store_loads_short", "Loads that gave fewer tokens than ordered.")
    loads_cancelled: int = counter(
        "store_loads_cancelled", "Loads cancelled, since their request was preempted or has ended."
    )
    loaded_tokens: int = counter("store_loaded_tokens", "Tokens loaded and verified.")
    loaded_bytes: int = counter("store_loaded_bytes", "Bytes loaded and verified.")
    absent: int = counter("store_absent_blocks", "Blocks that a lookup found and the load did not.")
    corrupt: int = counter("store_corrupt_blocks", "Blocks that failed verification.")
    saves: int = counter("store_saves", "Saves to the store.")
    save_failures: int = counter(
        "store_save_failures", "Saves ended by an error or their deadline."
    )
    saves_dropped: int = counter(
        "store_saves_dropped", "Saves dropped because too many bytes were waiting."
    )
    saved_blocks: int = counter("store_saved_blocks", "Blocks written.")
    existing_blocks: int = counter(
        "store_existing_blocks", "Blocks offered that the store had already."
    )
    refused_blocks: int = counter("store_refused_blocks", "Blocks offered that the store refused.")
    saved_bytes: int = counter("store_saved_bytes", "Bytes written.")
    crashes: int = counter("store_job_crashes", "Jobs ended by a bug; the log has the traceback.")
    open_lookups: int = counter("store_lookups_open", "Open lookups.", gauge=True)
    open_loads: int = counter("store_loads_open", "Open loads.", gauge=True)
    open_saves: int = counter("store_saves_open", "Open saves.", gauge=True)
    open_save_bytes: int = counter("store_save_bytes_open", "Bytes of the open saves.", gauge=True)
    open_leases: int = counter("store_leases_open", "Leases held.", gauge=True)


class Meter:
    """The only writer of the counters; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = ConnectorCounters()

    @property
    def reading(self) -> ConnectorCounters:
        """The counters as they are now."""
        return self._counters

    def add(self, **changes: int) -> None:
        """Add to counters by name."""
        with self._lock:
            values = {name: getattr(self._counters, name) + n for name, n in changes.items()}
            self._counters = replace(self._counters, **values)
