"""The store of KV blocks: ``connect(url)`` for its users, ``python -m kvstore`` for the service.

Names are imported on first use: the service has a line to run before anything is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.base import Block, Found, Got, Kept, Lease, Offer, Outcome, Seen, Store, Want
    from kvstore.opening import connect
    from kvstore.records import Tail
    from kvstore.stats import Stats, Tally

__all__ = [
    "Block",
    "Found",
    "Got",
    "Kept",
    "Lease",
    "Offer",
    "Outcome",
    "Seen",
    "Stats",
    "Store",
    "Tail",
    "Tally",
    "Want",
    "connect",
]
_ELSEWHERE = {"connect": "opening", "Tail": "records", "Stats": "stats", "Tally": "stats"}


def __getattr__(name: str) -> object:
    if name in __all__:
        value: object = getattr(import_module(f"kvstore.{_ELSEWHERE.get(name, 'base')}"), name)
        return value
    raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
