"""What goes so that a block may come, where all blocks are one tenant's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from kvstore.claims import Claim
from kvstore.index.entries import IndexEntry
from kvstore.index.eviction.policy import EvictionNode, EvictionPolicy

V = TypeVar("V")


class VictimSelector(Generic[V]):
    """The policy's victim; when all that may go is followed by what is held, the oldest of them."""

    def __init__(self, policy: EvictionPolicy, entries: Mapping[bytes, IndexEntry[V]]) -> None:
        self._policy = policy
        self._entries = entries

    def victim(self) -> EvictionNode | None:
        """For whomever."""
        return self._policy.victim() or self._oldest_free()

    def victim_for(self, claim: Claim) -> EvictionNode | None:
        """What a index asks."""
        return self.victim()

    def _oldest_free(self) -> EvictionNode | None:
        """Rare, so all are looked through."""
        free = (entry for entry in self._entries.values() if not entry.leases)
        return min(free, key=lambda entry: entry.used, default=None)
