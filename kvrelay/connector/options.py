"""Limits of a store connector: seconds, bytes and threads."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """``lease_seconds`` minus the margin is how long a lookup's answer is relied upon."""

    lookup_seconds: float = 1.0  # asked until answered, waiting for a thread included
    queue_seconds: float = 30.0  # a load that waits longer for a thread is given up
    load_seconds: float = 5.0  # from its turn on, and more for many bytes:
    save_seconds: float = 10.0
    slowest_bytes_per_second: float = 100.0 * MIB
    lease_seconds: float = 30.0
    lease_margin_seconds: float = 6.0
    retry_seconds: float = 1.0  # an answer of nothing is asked again after this
    max_pending_save_bytes: int = 1024 * MIB
    batch_bytes: int = 64 * MIB  # scratch memory of one load or save
    lookup_threads: int = 2
    load_threads: int = 4
    save_threads: int = 2

    def load_timeout(self, nbytes: int) -> float:
        """Seconds a load of so many bytes may take."""
        return self.load_seconds + nbytes / self.slowest_bytes_per_second

    def save_timeout(self, nbytes: int) -> float:
        """Seconds a save of so many bytes may take."""
        return self.save_seconds + nbytes / self.slowest_bytes_per_second
