"""Eviction among tenants: who is furthest over its quota gives first, whoever asks for room.

Each tenant's blocks have a policy of their own. A tenant may use more than its quota while nobody
else wants the room; a block within its owner's quota goes for a block of the same owner only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvstore.claims import Claim, prefix_of
from kvstore.index.entries import IndexEntry
from kvstore.index.eviction.choosing import VictimSelector
from kvstore.index.eviction.policy import EvictionNode, EvictionPolicy


class _Part:
    """What one tenant has."""

    def __init__(self, policy: EvictionPolicy, quota: int) -> None:
        self.policy = policy
        self.quota = quota
        self.bytes = 0
        self.entries: dict[bytes, IndexEntry[int]] = {}
        self.victim = VictimSelector(policy, self.entries).victim


class QuotaPolicy:
    """An ``EvictionPolicy`` for the records of an index, which calls ``victim_for``."""

    def __init__(
        self,
        make: Callable[[], EvictionPolicy],
        quotas: Mapping[bytes, int],
        entry_bytes: int,
    ) -> None:
        self._make = make
        self._quotas = quotas
        self._entry_bytes = entry_bytes
        self._parts: dict[bytes, _Part] = {}
        self._now = 0.0

    @property
    def name(self) -> str:
        """That of the policy each tenant has."""
        return self._make().name

    def advance(self, now: float) -> None:
        """As the protocol says. Each part is told when it is used."""
        self._now = now

    def add(self, node: EvictionNode, parent: EvictionNode | None) -> None:
        """As the protocol says."""
        part = self._part(node)
        if isinstance(node, IndexEntry):
            part.entries[node.name] = node
            part.bytes += node.size + self._entry_bytes
        part.policy.add(node, parent)

    def touch(self, node: EvictionNode) -> None:
        """As the protocol says."""
        self._part(node).policy.touch(node)

    def hold(self, node: EvictionNode) -> None:
        """As the protocol says."""
        self._part(node).policy.hold(node)

    def free(self, node: EvictionNode) -> None:
        """As the protocol says."""
        self._part(node).policy.free(node)

    def remove(self, node: EvictionNode, parent: EvictionNode | None) -> None:
        """As the protocol says."""
        part = self._part(node)
        if isinstance(node, IndexEntry):
            del part.entries[node.name]
            part.bytes -= node.size + self._entry_bytes
        part.policy.remove(node, parent)

    def victim(self) -> EvictionNode | None:
        """As the protocol says, for nobody in particular."""
        return self._among(None, 0)

    def victim_for(self, claim: Claim) -> EvictionNode | None:
        """What goes so that ``claim`` may come; ``None`` if there is nothing that may."""
        return self._among(prefix_of(claim.name), claim.size + self._entry_bytes)

    def used(self, prefix: bytes) -> tuple[int, int]:
        """Blocks and bytes of one tenant."""
        part = self._parts.get(prefix)
        return (0, 0) if part is None else (len(part.entries), part.bytes)

    def prefixes(self) -> list[bytes]:
        """Of all that ever had a block."""
        return list(self._parts)

    def _among(self, asker: bytes | None, size: int) -> EvictionNode | None:
        over = {
            prefix: part.bytes + (size if prefix == asker else 0) - part.quota
            for prefix, part in self._parts.items()
        }
        for prefix in sorted(over, key=over.__getitem__, reverse=True):
            if over[prefix] <= 0 and prefix != asker:
                continue
            part = self._parts[prefix]
            part.policy.advance(self._now)
            if (victim := part.victim()) is not None:
                return victim
        return None

    def _part(self, node: EvictionNode) -> _Part:
        prefix = prefix_of(node.name)
        if (part := self._parts.get(prefix)) is None:
            part = self._parts[prefix] = _Part(self._make(), self._quotas.get(prefix, 0))
        part.policy.advance(self._now)
        return part
