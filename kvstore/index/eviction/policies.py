"""The eviction policies by name."""

from __future__ import annotations

from kvstore.index.eviction.expected_returns import GHOSTS, ExpectedReturns
from kvstore.index.eviction.policy import EvictionPolicy, LeastRecentlyUsed

EVICTIONS = (ExpectedReturns.name, LeastRecentlyUsed.name)
"""The first is what a store does unless told otherwise."""


def make_policy(name: str, parts: int = 1) -> EvictionPolicy:
    """One for a store, or for each of ``parts`` that share what is remembered of evicted blocks."""
    return LeastRecentlyUsed() if name == "lru" else ExpectedReturns(GHOSTS // max(parts, 1))
