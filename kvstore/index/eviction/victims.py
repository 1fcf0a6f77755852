"""Which block is evicted to make room for a claim: of one tenant, and among tenants.

Among tenants the one furthest over its quota loses a block first. Each tenant has a policy of its
own. A tenant may exceed its quota while no other needs the room; a block within its
tenant's quota is evicted only for a block of the same tenant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from kvstore.claims import Claim, prefix_of
from kvstore.index.entries import IndexEntry
from kvstore.index.eviction.policy import EvictionNode, EvictionPolicy

V = TypeVar("V")

ChooseVictim = Callable[[Claim], EvictionNode | None]
"""The block to evict so that the claimed block fits; ``None`` if there is no candidate."""


class VictimSelector(Generic[V]):
    """The victim of one policy; the oldest free block if every free block has leased children."""

    def __init__(self, policy: EvictionPolicy, entries: Mapping[bytes, IndexEntry[V]]) -> None:
        self._policy = policy
        self._entries = entries

    def victim(self) -> EvictionNode | None:
        """The block to evict next."""
        return self._policy.victim() or self._oldest_free()

    def victim_for(self, claim: Claim) -> EvictionNode | None:
        """The same, for any claim."""
        return self.victim()

    def _oldest_free(self) -> EvictionNode | None:
        """Rare: searches all entries."""
        free = (entry for entry in self._entries.values() if not entry.leases)
        return min(free, key=lambda entry: entry.used, default=None)


class _TenantBlocks:
    """The blocks of one tenant."""

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
        self._tenants: dict[bytes, _TenantBlocks] = {}
        self._now = 0.0

    @property
    def name(self) -> str:
        """The name of the policy that each tenant has."""
        return self._make().name

    def advance(self, now: float) -> None:
        self._now = now

    def add(self, node: EvictionNode, parent: EvictionNode | None) -> None:
        tenant = self._tenant(node)
        if isinstance(node, IndexEntry):
            tenant.entries[node.name] = node
            tenant.bytes += node.size + self._entry_bytes
        tenant.policy.add(node, parent)

    def touch(self, node: EvictionNode) -> None:
        self._tenant(node).policy.touch(node)

    def hold(self, node: EvictionNode) -> None:
        self._tenant(node).policy.hold(node)

    def free(self, node: EvictionNode) -> None:
        self._tenant(node).policy.free(node)

    def remove(self, node: EvictionNode, parent: EvictionNode | None) -> None:
        tenant = self._tenant(node)
        if isinstance(node, IndexEntry):
            del tenant.entries[node.name]
            tenant.bytes -= node.size + self._entry_bytes
        tenant.policy.remove(node, parent)

    def victim(self) -> EvictionNode | None:
        return self._among(None, 0)

    def victim_for(self, claim: Claim) -> EvictionNode | None:
        """The block to evict for ``claim``; ``None`` if there is no candidate."""
        return self._among(prefix_of(claim.name), claim.size + self._entry_bytes)

    def used(self, prefix: bytes) -> tuple[int, int]:
        """Blocks and bytes of one tenant."""
        tenant = self._tenants.get(prefix)
        return (0, 0) if tenant is None else (len(tenant.entries), tenant.bytes)

    def prefixes(self) -> list[bytes]:
        """The prefixes of all tenants that ever stored a block."""
        return list(self._tenants)

    def _among(self, asker: bytes | None, size: int) -> EvictionNode | None:
        over = {
            prefix: tenant.bytes + (size if prefix == asker else 0) - tenant.quota
            for prefix, tenant in self._tenants.items()
        }
        for prefix in sorted(over, key=over.__getitem__, reverse=True):
            if over[prefix] <= 0 and prefix != asker:
                continue
            tenant = self._tenants[prefix]
            tenant.policy.advance(self._now)
            if (victim := tenant.victim()) is not None:
                return victim
        return None

    def _tenant(self, node: EvictionNode) -> _TenantBlocks:
        prefix = prefix_of(node.name)
        if (tenant := self._tenants.get(prefix)) is None:
            tenant = self._tenants[prefix] = _TenantBlocks(
                self._make(), self._quotas.get(prefix, 0)
            )
        tenant.policy.advance(self._now)
        return tenant
