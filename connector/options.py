"""Limits of a store connector: seconds, bytes and threads."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """``lease_seconds`` minus the margin is how long a lookup's answer is relied upon."""

    lookup_seconds: float = 1.0
    load_seconds: float = 5.0
    save_seconds: float = 10.0
    lease_seconds: float = 30.0
    lease_margin_seconds: float = 6.0
    retry_seconds: float = 1.0  # an answer of nothing is asked again after this
    max_pending_save_bytes: int = 1024 * MIB
    batch_bytes: int = 64 * MIB  # scratch memory of one load or save
    lookup_threads: int = 2
    load_threads: int = 4
    save_threads: int = 2
