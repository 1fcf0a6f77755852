"""Which stores a request's external tokens came from: told by the connector, made to add up here.

The scheduler counts tokens and knows of no store. What the connector tells is cut, or filled up
with ``UNKNOWN``, to the number that the admission has, so the sum by store is always ``external``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

UNKNOWN = "unknown"


def apportion(told: Iterable[tuple[str, int]], external: int) -> Mapping[str, int]:
    """Tokens by store, ``external`` in all."""
    found: dict[str, int] = {}
    left = external
    for store, tokens in (*told, (UNKNOWN, external)):
        count = min(max(tokens, 0), left)
        if count:
            found[store] = found.get(store, 0) + count
            left -= count
    return found


def add_by_store(one: Mapping[str, int], other: Mapping[str, int]) -> Mapping[str, int]:
    """The sums by store."""
    return {store: one.get(store, 0) + other.get(store, 0) for store in {**one, **other}}
