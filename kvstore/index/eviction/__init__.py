"""The eviction policies by name."""

from __future__ import annotations

from kvstore.index.eviction.expected_returns import GHOSTS, ExpectedReturns
from kvstore.index.eviction.policy import EvictionPolicy, LeastRecentlyUsed
from kvstore.limits import LRU


def make_policy(name: str, parts: int = 1) -> EvictionPolicy:
    """One for a store, or for each of ``parts`` that share the memory of evicted blocks."""
    return LeastRecentlyUsed() if name == LRU else ExpectedReturns(GHOSTS // max(parts, 1))
