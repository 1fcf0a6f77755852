"""Chains that are put in parts while others are: what is stored of each is a prefix.

A block whose parent is absent is found by no lookup. It would take the room of one that is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kvstore.base import PutStatus
from kvstore.claims import Claim
from kvstore.index.block_index import BlockIndex, IndexOptions
from kvstore.index.eviction import make_policy
from kvstore.index.eviction.policy import EvictionPolicy
from kvstore.index.eviction.victims import QuotaPolicy
from kvstore.limits import EVICTIONS, WHOLE_BUDGET, ReservationShares

LIFE = 1e9


def new(policy: str, budget: int, shares: ReservationShares = WHOLE_BUDGET) -> BlockIndex[int]:
    options = IndexOptions(budget, LIFE, b"boot", shares=shares)
    return BlockIndex(options, make_policy(policy))


def chain(label: str, length: int, shared: Sequence[bytes] = ()) -> list[bytes]:
    """Names of ``length`` blocks, of which the first are ``shared`` with another chain."""
    own = [f"{label}{depth}".encode().rjust(32, b".") for depth in range(len(shared), length)]
    return [*shared, *own]


def lead(index: BlockIndex[int], names: Sequence[bytes]) -> int:
    return index.lookup(names, [], 0.0, 0.0).lead


def orphaned(index: BlockIndex[int]) -> list[bytes]:
    """Absent blocks that stored ones continue."""
    stored = {entry.name: entry.parent for entry in index.entries(0.0)}
    return [above for above in stored.values() if above is not None and above not in stored]


@dataclass
class Writer:
    """Puts a chain in parts of random length, each as a client does: in order, and until settled.

    ``step`` reserves what is left of a part, or sends one block, or leases what is stored.
    """

    index: BlockIndex[int]
    names: list[bytes]
    chance: random.Random
    most: int
    done: int = 0
    part: list[Claim] = field(default_factory=list)
    sending: list[Claim] = field(default_factory=list)
    ticket: int = 0
    lease: int | None = None

    @property
    def ended(self) -> bool:
        return not self.part and not self.sending and self.done == len(self.names)

    def step(self, now: float) -> None:
        if self.sending:
            claim = self.sending.pop(0)
            assert self.index.commit(self.ticket, claim.name, 0, now, claim.parent)
        elif self.lease is None and self.chance.random() < 0.2:
            found = self.index.lookup(self.names, [], LIFE, now)
            self.lease = None if found.lease is None else found.lease.id
        else:
            self._reserve(now)
        if self.lease is not None and (self.ended or self.chance.random() < 0.2):
            self.index.release(self.lease)
            self.lease = None

    def _reserve(self, now: float) -> None:
        if not self.part:
            end = min(self.done + self.chance.randint(1, self.most), len(self.names))
            parents = [None, *self.names]
            self.part = [
                Claim(self.names[depth], 1, False, parent=parents[depth])
                for depth in range(self.done, end)
            ]
            self.done = end
        grant = self.index.reserve(self.part, LIFE, now)
        pairs = list(zip(self.part, grant.verdicts, strict=True))
        self.ticket = grant.ticket or 0
        self.sending = [claim for claim, verdict in pairs if verdict is PutStatus.RESERVED]
        self.part = [claim for claim, verdict in pairs if verdict is PutStatus.PENDING]


@pytest.mark.parametrize("policy", EVICTIONS)
@pytest.mark.parametrize("length", [11, 15, 20])
@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_two_prompts_put_in_turns_fill_the_store_with_their_heads(
    policy: str, length: int, size: int
) -> None:
    """Of two chains of 15 blocks put in turns, a store of 10 blocks kept none that was found."""
    index = new(policy, 10)
    chains = [chain("a", length), chain("b", length)]
    for start in range(0, length, size):
        for names in chains:
            parents = [names[start - 1] if start else None, *names[start:]]
            claims = [
                Claim(name, 1, False, parent=above)
                for name, above in zip(names[start : start + size], parents, strict=False)
            ]
            grant = index.reserve(claims, LIFE, float(start))
            for claim, verdict in zip(claims, grant.verdicts, strict=True):
                if verdict is PutStatus.RESERVED and grant.ticket is not None:
                    index.commit(grant.ticket, claim.name, 0, float(start), claim.parent)
    assert sum(lead(index, names) for names in chains) == 10
    assert index.counters.orphaned > 0
    assert (orphaned(index), index.audit()) == ([], [])


@pytest.mark.parametrize("policy", [*EVICTIONS, "quotas"])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_put_in_turns_each_chain_keeps_a_prefix(policy: str, seed: int) -> None:
    chance = random.Random(f"{policy} {seed}")
    print(f"seed {policy} {seed}")
    for _ in range(15):
        budget = chance.randint(2, 40)
        shares = ReservationShares(ticket=chance.choice((0.1, 0.25, 1.0)), all=1.0)
        chosen: EvictionPolicy | QuotaPolicy[int]
        if policy == "quotas":
            chosen = QuotaPolicy(lambda: make_policy("lru"), {b"": budget}, 0)
        else:
            chosen = make_policy(policy)
        index: BlockIndex[int] = BlockIndex(
            IndexOptions(budget, LIFE, b"boot", shares=shares), chosen
        )
        first = chain("a", chance.randint(1, 2 * budget))
        chains = [first]
        for label in "bcd"[: chance.randint(1, 3)]:
            shared = first[: chance.randint(0, len(first))] if chance.random() < 0.4 else []
            chains.append(chain(label, len(shared) + chance.randint(1, 2 * budget), shared))
        writers = [Writer(index, names, chance, chance.randint(1, budget)) for names in chains]
        now = 0.0
        while left := [writer for writer in writers if not writer.ended]:
            now += chance.choice((0.0, 0.01, 30.0))
            chance.choice(left).step(now)
            assert index.audit() == []
            assert all(above in index.reservations for above in orphaned(index))
        wanted = len({name for names in chains for name in names})
        assert (orphaned(index), index.audit()) == ([], [])
        assert len(index.entries(now)) >= min(budget, wanted), (budget, wanted)
