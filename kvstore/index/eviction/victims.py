"""Which block is evicted to make room for a claim: of one tenant, and among tenants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Generic, TypeVar

from kvstore.claims import Claim, prefix_of
from kvstore.index.entries import IndexEntry
from kvstore.index.eviction.hints import Hint, HintCounters, HintTable
from kvstore.index.eviction.policy import EvictionNode, EvictionPolicy, LeastRecentlyUsed

V = TypeVar("V")

ReportFailure = Callable[[Exception], None]
"""Is given the error of a policy that was replaced by LRU."""


def ignore_failure(error: Exception) -> None:
    """A ``ReportFailure`` for stores without a log; ``failures`` counts all the same."""


class SafePolicy(Generic[V]):
    """Calls a policy for the stored ``blocks``; LRU replaces the policy if it raises.

    Eviction decides what is kept, never whether a put succeeds. ``failures`` counts the errors.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        blocks: Mapping[bytes, IndexEntry[V]],
        report: ReportFailure = ignore_failure,
    ) -> None:
        self._policy = policy
        self._blocks = blocks
        self._report = report
        self._covered: Counter[bytes] = Counter()
        self.hints = HintCounters()
        self._hinted = self._no_hints()
        self._newest = 0  # use of any block
        self.failures = 0

    @property
    def name(self) -> str:
        """The name of the policy that decides now."""
        return self._policy.name

    @property
    def overhead_bytes(self) -> int:
        """Of the policy and of hints."""
        return self._policy.overhead_bytes + self._hinted.overhead_bytes

    @property
    def counts(self) -> dict[str, int]:
        """By name of the counter in ``StoreCounters``."""
        return {"eviction_failures": self.failures, **asdict(self.hints)}

    def hint(self, hint: Hint, quota: int) -> None:
        """Take in a hint for blocks of this scope, whose quota is in bytes."""
        try:
            self._hinted.receive(hint, quota)
        except Exception as error:  # noqa: BLE001 - no policy may end a put; counted, reported
            self._replace(error)

    def advance(self, now: float) -> None:
        try:
            self._hinted.advance(now)
            self._policy.advance(now)
        except Exception as error:  # noqa: BLE001 - as above
            self._replace(error)

    def add(self, node: IndexEntry[V], parent: IndexEntry[V] | None) -> None:
        """See ``EvictionPolicy.add``; the node is among ``blocks``."""
        try:
            self._policy.add(node, parent)
            self._newest = node.used
        except Exception as error:  # noqa: BLE001 - as above
            self._replace(error).touch(node)

    def touch(self, node: IndexEntry[V]) -> None:
        try:
            self._hinted.used(node)
            self._policy.touch(node)
            self._newest = node.used
        except Exception as error:  # noqa: BLE001 - as above
            self._replace(error).touch(node)

    def cover(self, name: bytes, node: IndexEntry[V] | None) -> None:
        self._covered[name] += 1
        try:
            self._policy.cover(name, node)
        except Exception as error:  # noqa: BLE001 - as above
            self._replace(error)

    def uncover(self, name: bytes, node: IndexEntry[V] | None) -> None:
        self._covered[name] -= 1
        if not self._covered[name]:
            del self._covered[name]
        try:
            self._policy.uncover(name, node)
        except Exception as error:  # noqa: BLE001 - as above
            self._replace(error)

    def hold(self, node: IndexEntry[V]) -> None:
        try:
            self._hinted.used(node)
            self._policy.hold(node)
        except Exception as error:  # noqa: BLE001 - as above
            self._replace(error).hold(node)

    def free(self, node: IndexEntry[V]) -> None:
        try:
            self._policy.free(node)
            self._newest = node.used
        except Exception as error:  # noqa: BLE001 - as above
            self._replace(error).free(node)

    def remove(self, node: IndexEntry[V], parent: IndexEntry[V] | None) -> None:
        """See ``EvictionPolicy.remove``; the node is no longer among ``blocks``."""
        try:
            self._hinted.removed(node)
            self._policy.remove(node, parent)
        except Exception as error:  # noqa: BLE001 - as above
            self._replace(error)

    def victim(self) -> EvictionNode | None:
        """The block to evict next; ``None`` if none may be.

        One of a run hinted as late if there is one, one of a run expected soon if none else is.
        """
        try:
            victim = self._policy.victim()
            victim = self._hinted.instead_of(victim, self._policy.choose, self._newest)
            while victim is None and self._hinted.yield_one():
                victim = self._policy.victim()
        except Exception as error:  # noqa: BLE001 - as above
            victim = self._replace(error).victim()
        return self._oldest_inner() if victim is None else victim

    def victim_for(self, claim: Claim) -> EvictionNode | None:
        """The same, for any claim."""
        return self.victim()

    def _oldest_inner(self) -> EvictionNode | None:
        """Every free block has leased children: the oldest, but none that a write continues.

        Rare: searches all blocks.
        """
        needed: set[bytes] = set()
        for name in self._covered:
            above: bytes | None = name
            while above is not None and above not in needed and above in self._blocks:
                needed.add(above)
                above = self._blocks[above].parent
        free = (b for b in self._blocks.values() if not b.leases and b.name not in needed)
        return min(free, key=lambda block: block.used, default=None)

    def _no_hints(self) -> HintTable[V]:
        blocks = self._blocks
        return HintTable(
            blocks,
            lambda name: self._policy.cover(name, blocks.get(name)),
            lambda name: self._policy.uncover(name, blocks.get(name)),
            self.hints,
        )

    def _replace(self, error: Exception) -> EvictionPolicy:
        """Continue with LRU, without hints, which knows every block in the order of its use."""
        self.failures += 1
        self._report(error)
        self._policy = plain = LeastRecentlyUsed()
        self._hinted = self._no_hints()
        for name, count in self._covered.items():
            for _ in range(count):
                plain.cover(name, None)
        for block in sorted(self._blocks.values(), key=lambda block: block.used):
            plain.add(block, None)
        return plain


class _TenantBlocks(Generic[V]):
    """The blocks of one tenant."""

    def __init__(self, policy: EvictionPolicy, quota: int, report: ReportFailure) -> None:
        self.quota = quota
        self.bytes = 0
        self.entries: dict[bytes, IndexEntry[V]] = {}
        self.policy = SafePolicy(policy, self.entries, report)


class QuotaPolicy(Generic[V]):
    """A policy of its own for each tenant, with the interface of ``SafePolicy``.

    Of the tenants the one furthest over its quota loses a block first. A tenant may exceed its
    quota while no other needs the room; a block within its tenant's quota is evicted only for a
    block of the same tenant.
    """

    def __init__(
        self,
        make: Callable[[], EvictionPolicy],
        quotas: Mapping[bytes, int],
        entry_bytes: int,
        report: ReportFailure = ignore_failure,
    ) -> None:
        self.name = make().name
        self._make = make
        self._quotas = quotas
        self._entry_bytes = entry_bytes
        self._report = report
        self._tenants: dict[bytes, _TenantBlocks[V]] = {}
        self._now = 0.0

    @property
    def overhead_bytes(self) -> int:
        """The sum over all tenants' policies."""
        return sum(tenant.policy.overhead_bytes for tenant in self._tenants.values())

    @property
    def counts(self) -> dict[str, int]:
        """The sums over all tenants."""
        total = Counter({"eviction_failures": 0})
        for tenant in self._tenants.values():
            total.update(tenant.policy.counts)
        return dict(total)

    def hint(self, hint: Hint, quota: int) -> None:
        """Take in a hint; its blocks are of one tenant, whose quota counts."""
        if hint.names:
            tenant = self._tenant(hint.names[0])
            tenant.policy.hint(hint, min(quota, tenant.quota))

    def advance(self, now: float) -> None:
        self._now = now

    def add(self, node: IndexEntry[V], parent: IndexEntry[V] | None) -> None:
        tenant = self._tenant(node.name)
        tenant.entries[node.name] = node
        tenant.bytes += node.size + self._entry_bytes
        tenant.policy.add(node, parent)

    def touch(self, node: IndexEntry[V]) -> None:
        self._tenant(node.name).policy.touch(node)

    def cover(self, name: bytes, node: IndexEntry[V] | None) -> None:
        self._tenant(name).policy.cover(name, node)

    def uncover(self, name: bytes, node: IndexEntry[V] | None) -> None:
        self._tenant(name).policy.uncover(name, node)

    def hold(self, node: IndexEntry[V]) -> None:
        self._tenant(node.name).policy.hold(node)

    def free(self, node: IndexEntry[V]) -> None:
        self._tenant(node.name).policy.free(node)

    def remove(self, node: IndexEntry[V], parent: IndexEntry[V] | None) -> None:
        tenant = self._tenant(node.name)
        del tenant.entries[node.name]
        tenant.bytes -= node.size + self._entry_bytes
        tenant.policy.remove(node, parent)

    def victim_for(self, claim: Claim) -> EvictionNode | None:
        """The block to evict for ``claim``; ``None`` if there is no candidate."""
        asker = prefix_of(claim.name)
        size = claim.size + self._entry_bytes
        over = {
            prefix: tenant.bytes + (size if prefix == asker else 0) - tenant.quota
            for prefix, tenant in self._tenants.items()
        }
        for prefix in sorted(over, key=over.__getitem__, reverse=True):
            if over[prefix] <= 0 and prefix != asker:
                continue
            tenant = self._tenants[prefix]
            tenant.policy.advance(self._now)
            if (victim := tenant.policy.victim()) is not None:
                return victim
        return None

    def used(self, prefix: bytes) -> tuple[int, int]:
        """Blocks and bytes of one tenant."""
        tenant = self._tenants.get(prefix)
        return (0, 0) if tenant is None else (len(tenant.entries), tenant.bytes)

    def prefixes(self) -> list[bytes]:
        """The prefixes of all tenants that ever stored a block."""
        return list(self._tenants)

    def _tenant(self, name: bytes) -> _TenantBlocks[V]:
        prefix = prefix_of(name)
        if (tenant := self._tenants.get(prefix)) is None:
            quota = self._quotas.get(prefix, 0)
            tenant = self._tenants[prefix] = _TenantBlocks(self._make(), quota, self._report)
        tenant.policy.advance(self._now)
        return tenant
