"""Eviction among tenants: who is furthest over its quota gives first, whoever asks for room.

Each tenant's blocks have a policy of their own. A tenant may use more than its quota while nobody
else wants the room; a block within its owner's quota goes for a block of the same owner only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvstore.book.choosing import Chooser
from kvstore.book.entries import Entry
from kvstore.book.keys import prefix_of
from kvstore.book.policy import Node, Policy
from kvstore.book.tenants import Owner
from kvstore.records import Claim


class _Part:
    """What one tenant has."""

    def __init__(self, policy: Policy, quota: int) -> None:
        self.policy = policy
        self.quota = quota
        self.bytes = 0
        self.entries: dict[bytes, Entry[int]] = {}
        self.victim = Chooser(policy, self.entries).victim


class Divided:
    """A ``Policy`` for the catalog's records; ``victim_for`` is what a catalog is to ask."""

    def __init__(
        self, make: Callable[[], Policy], owners: Mapping[bytes, Owner], entry_bytes: int
    ) -> None:
        self._make = make
        self._owners = owners
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

    def add(self, node: Node, parent: Node | None) -> None:
        """As the protocol says."""
        part = self._part(node)
        if isinstance(node, Entry):
            part.entries[node.name] = node
            part.bytes += node.size + self._entry_bytes
        part.policy.add(node, parent)

    def touch(self, node: Node) -> None:
        """As the protocol says."""
        self._part(node).policy.touch(node)

    def hold(self, node: Node) -> None:
        """As the protocol says."""
        self._part(node).policy.hold(node)

    def free(self, node: Node) -> None:
        """As the protocol says."""
        self._part(node).policy.free(node)

    def remove(self, node: Node, parent: Node | None) -> None:
        """As the protocol says."""
        part = self._part(node)
        if isinstance(node, Entry):
            del part.entries[node.name]
            part.bytes -= node.size + self._entry_bytes
        part.policy.remove(node, parent)

    def victim(self) -> Node | None:
        """As the protocol says, for nobody in particular."""
        return self._among(None, 0)

    def victim_for(self, claim: Claim) -> Node | None:
        """What goes so that ``claim`` may come; ``None`` if there is nothing that may."""
        return self._among(prefix_of(claim.name), claim.size + self._entry_bytes)

    def used(self, prefix: bytes) -> tuple[int, int]:
        """Blocks and bytes of one tenant."""
        part = self._parts.get(prefix)
        return (0, 0) if part is None else (len(part.entries), part.bytes)

    def prefixes(self) -> list[bytes]:
        """Of all that ever had a block."""
        return list(self._parts)

    def _among(self, asker: bytes | None, size: int) -> Node | None:
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

    def _part(self, node: Node) -> _Part:
        prefix = prefix_of(node.name)
        if (part := self._parts.get(prefix)) is None:
            owner = self._owners.get(prefix)
            part = self._parts[prefix] = _Part(self._make(), 0 if owner is None else owner.quota)
        part.policy.advance(self._now)
        return part
