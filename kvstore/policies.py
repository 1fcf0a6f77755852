"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.policy import LeastRecentlyUsed, Policy

POLICIES: dict[str, Callable[[], Policy]] = {"lru": LeastRecentlyUsed}
