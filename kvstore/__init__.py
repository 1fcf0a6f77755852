"""The store of KV blocks: ``connect(url)`` for its users, ``python -m kvstore`` for the service.

Names are imported on first use: the service has a line to run before anything is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.base import (
        Block,
        GetResult,
        Lease,
        LookupResult,
        Offer,
        Outcome,
        PutStatus,
        Store,
        SurveyResult,
        Tail,
        Want,
    )
    from kvstore.client.connect import connect
    from kvstore.stats import StoreCounters, StoreStats

__all__ = [
    "Block",
    "GetResult",
    "Lease",
    "LookupResult",
    "Offer",
    "Outcome",
    "PutStatus",
    "Store",
    "StoreCounters",
    "StoreStats",
    "SurveyResult",
    "Tail",
    "Want",
    "connect",
]
_ELSEWHERE = {
    "connect": "client.connect",
    "StoreStats": "stats",
    "StoreCounters": "stats",
}


def __getattr__(name: str) -> object:
    if name in __all__:
        value: object = getattr(import_module(f"kvstore.{_ELSEWHERE.get(name, 'base')}"), name)
        return value
    raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
