"""A store's blocks and who may go, kept in the plainest way: what a policy is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.index.eviction.policy import EvictionNode, EvictionPolicy


@dataclass
class Naive:
    """Drives a policy and remembers in lists what it was told."""

    policy: EvictionPolicy
    nodes: dict[bytes, EvictionNode] = field(default_factory=dict)
    held: set[bytes] = field(default_factory=set)
    now: float = 0.0

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.policy.advance(self.now)

    def parent(self, node: EvictionNode) -> EvictionNode | None:
        return None if node.parent is None else self.nodes.get(node.parent)

    def add(self, name: bytes, parent: bytes | None, partial: bool = False) -> None:
        node = EvictionNode(name, parent, partial)
        self.nodes[name] = node
        self.policy.add(node, self.parent(node))

    def use(self, name: bytes) -> None:
        self.policy.touch(self.nodes[name])

    def hold(self, name: bytes) -> None:
        self.held.add(name)
        self.policy.hold(self.nodes[name])

    def free(self, name: bytes) -> None:
        self.held.discard(name)
        self.policy.free(self.nodes[name])

    def remove(self, name: bytes) -> None:
        node = self.nodes.pop(name)
        self.held.discard(name)
        self.policy.remove(node, self.parent(node))

    def leaves(self) -> set[bytes]:
        """What may go: free, and nothing that is there follows it."""
        followed = {node.parent for node in self.nodes.values()}
        return {name for name in self.nodes if name not in self.held and name not in followed}

    def check(self) -> None:
        """The victim is one of those that may go, and there is one if any may."""
        victim, leaves = self.policy.victim(), self.leaves()
        assert victim.name in leaves if victim is not None else not leaves
