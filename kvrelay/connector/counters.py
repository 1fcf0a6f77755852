"""The counters of a store connector, for the metrics."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ConnectorCounters:
    """Counts since the start; the ``open_`` ones count what is under way now."""

    lookups: int = 0  # sent to the store
    lookup_hits: int = 0  # answers with tokens
    lookup_failures: int = 0  # no answer in time, or an error: counts as no tokens
    lookup_tokens: int = 0  # tokens in the answers
    loads: int = 0
    load_failures: int = 0  # ended by an error or the deadline
    loads_short: int = 0  # fewer tokens than ordered, for any reason
    loaded_tokens: int = 0  # verified tokens
    loaded_bytes: int = 0
    absent: int = 0  # blocks that a lookup found and the load did not
    corrupt: int = 0  # blocks that failed verification
    saves: int = 0
    save_failures: int = 0
    saves_dropped: int = 0  # too many bytes were waiting
    saved_blocks: int = 0  # written by this worker
    existing_blocks: int = 0  # in the store already
    refused_blocks: int = 0  # no room, or another writer did not finish
    saved_bytes: int = 0  # of the blocks written by this worker
    crashes: int = 0  # jobs ended by a bug; the log has the traceback
    open_lookups: int = 0
    open_loads: int = 0
    open_saves: int = 0
    open_save_bytes: int = 0
    open_leases: int = 0


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
