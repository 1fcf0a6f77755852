"""The store of KV blocks: ``connect(url)`` for its users, ``python -m kvstore`` for the service."""

from kvstore.base import Block, Found, Got, Kept, Lease, Offer, Outcome, Seen, Store, Want
from kvstore.connect import connect
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
