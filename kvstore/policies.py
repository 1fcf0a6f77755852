"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.policy import LeastRecentlyUsed, Policy
from kvstore.returns import ExpectedReturns

POLICIES: dict[str, Callable[[], Policy]] = {
    LeastRecentlyUsed.name: LeastRecentlyUsed,
    ExpectedReturns.name: ExpectedReturns,
}
