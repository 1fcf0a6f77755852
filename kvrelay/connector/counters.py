"""What a store connector did and holds, for the metrics."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ConnectorCounters:
    """Counts since the start, and (the ``open_`` ones) what is under way now."""

    lookups: int = 0  # asked of the store
    lookup_hits: int = 0  # of these, found something
    lookup_failures: int = 0  # no answer in time, or an error: taken as nothing found
    lookup_tokens: int = 0  # tokens found
    loads: int = 0
    load_failures: int = 0  # ended by an error or the deadline
    loads_short: int = 0  # gave fewer tokens than ordered, for whatever reason
    loaded_tokens: int = 0  # valid ones
    loaded_bytes: int = 0
    absent: int = 0  # blocks that were promised and not there
    corrupt: int = 0  # blocks that were not what was wanted
    saves: int = 0
    save_failures: int = 0
    saves_dropped: int = 0  # too much was waiting
    saved_blocks: int = 0  # written by us
    existing_blocks: int = 0  # there before
    refused_blocks: int = 0  # no room, or another writer did not finish
    saved_bytes: int = 0  # of the blocks written by us
    crashes: int = 0  # jobs ended by a bug; the log has the traceback
    open_lookups: int = 0
    open_loads: int = 0
    open_saves: int = 0
    open_save_bytes: int = 0
    open_leases: int = 0


class Meter:
    """The one place where they change; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = ConnectorCounters()

    @property
    def reading(self) -> ConnectorCounters:
        """As they are now."""
        return self._counters

    def add(self, **changes: int) -> None:
        """Add to the counters named."""
        with self._lock:
            values = {name: getattr(self._counters, name) + n for name, n in changes.items()}
            self._counters = replace(self._counters, **values)
