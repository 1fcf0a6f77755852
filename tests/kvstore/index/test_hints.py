"""Hints to eviction: what they keep, what they give up first, and that they are advice alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvstore.base import PutStatus
from kvstore.claims import Claim
from kvstore.index.block_index import BlockIndex, IndexOptions
from kvstore.index.eviction import make_policy
from kvstore.index.eviction.hints import Hint, HintCounters, HintTable
from kvstore.index.eviction.policy import LeastRecentlyUsed
from kvstore.index.eviction.victims import QuotaPolicy
from kvstore.limits import EVICTIONS, HINTED_SHARE, MAX_RUNS

SIZE = 10
FOREVER = 1e9


def new(blocks: int = 10, policy: str = "lru") -> BlockIndex[None]:
    return BlockIndex(IndexOptions(blocks * SIZE, FOREVER, b"boot"), make_policy(policy))


def run(name: str, blocks: int) -> list[bytes]:
    """The names of a sequence."""
    return [f"{name}{depth}".encode() for depth in range(blocks)]


def put(index: BlockIndex[None], names: Sequence[bytes], now: float = 0.0) -> list[PutStatus]:
    """Put what is missing of a sequence, as a worker does after its lookup."""
    lease = index.lookup(names, [], FOREVER, now).lease
    parents = [None, *names]
    claims = [Claim(one, SIZE, False, None, parents[i]) for i, one in enumerate(names)]
    if lease is not None:
        index.release(lease.id)
    grant = index.reserve(claims, FOREVER, now)
    for claim, verdict in zip(claims, grant.verdicts, strict=True):
        if verdict is PutStatus.RESERVED and grant.ticket is not None:
            assert index.commit(grant.ticket, claim.name, None, now, claim.parent)
    return list(grant.verdicts)


def lead(index: BlockIndex[None], names: Sequence[bytes], now: float = 0.0) -> int:
    return index.lookup(names, [], 0.0, now).lead


def hint(
    names: Sequence[bytes],
    soon: bool = True,
    life: float = 60.0,
    tenant: str = "",
    most: int = 1 << 60,
) -> Hint:
    return Hint(names, soon, life, tenant, most)


@pytest.mark.parametrize("policy", EVICTIONS)
def test_a_run_expected_soon_outlives_all_others(policy: str) -> None:
    index = new(policy=policy)
    put(index, run("a", 4))
    index.hint([hint(run("a", 4))], 1.0)
    for number in range(20):
        put(index, run(f"x{number}-", 2), 2.0)
    assert lead(index, run("a", 4), 3.0) == 4
    assert index.stats().counters.hints_received == 1
    index = new(policy=policy)
    put(index, run("a", 4))
    for number in range(20):
        put(index, run(f"x{number}-", 2), 2.0)
    assert lead(index, run("a", 4), 3.0) == 0


@pytest.mark.parametrize("policy", EVICTIONS)
def test_a_run_expected_late_goes_first(policy: str) -> None:
    index = new(12, policy=policy)
    put(index, run("old", 4))
    put(index, run("new", 4), 1.0)
    put(index, run("x", 2), 2.0)
    index.hint([hint(run("new", 4), soon=False)], 2.0)
    put(index, run("y", 5), 3.0)
    assert (lead(index, run("old", 4), 4.0), lead(index, run("new", 4), 4.0)) == (4, 1)


def test_late_blocks_age_faster_and_others_still_go() -> None:
    """Clients that tell what they know are not left without room by those that do not."""
    index = new(30)
    put(index, run("idle", 4))
    for number in range(100):
        put(index, run(f"x{number}-", 4), 1.0)
        index.hint([hint(run(f"x{number}-", 4), soon=False)], 1.0)
    assert lead(index, run("idle", 4), 2.0) == 0


def test_a_late_run_does_not_take_what_another_sequence_uses() -> None:
    index = new()
    system = run("s", 2)
    put(index, [*system, *run("a", 2)])
    index.hint([hint([*system, *run("a", 2)], soon=False)], 1.0)
    put(index, [*system, *run("b", 2)], 2.0)
    put(index, run("old", 4), 0.5)  # the clock of the index does not go back
    put(index, run("x", 3), 3.0)
    assert lead(index, system, 4.0) == 2
    assert lead(index, [*system, *run("a", 2)], 4.0) == 2


def test_a_use_ends_a_hint() -> None:
    index = new()
    put(index, run("a", 2))
    index.hint([hint(run("a", 2), soon=False)], 1.0)
    put(index, run("b", 2), 2.0)
    put(index, run("a", 2), 3.0)  # it came back
    put(index, run("x", 8), 4.0)
    assert (lead(index, run("a", 2), 5.0), lead(index, run("b", 2), 5.0)) == (2, 0)
    assert index.stats().counters.hints_used == 1


def test_a_hint_ends_with_its_time_and_a_new_one_renews_it() -> None:
    index = new(4)
    for now in (0.0, 3.0):
        put(index, run("a", 2), 0.0)
        index.hint([hint(run("a", 2), life=5.0)], now)
    put(index, run("x", 2), 7.9)
    put(index, run("y", 2), 7.9)
    assert lead(index, run("a", 2), 7.9) == 2
    put(index, run("z", 2), 8.1)
    put(index, run("w", 2), 8.1)
    assert lead(index, run("a", 2), 8.1) == 0
    assert index.stats().counters.hints_expired == 1


def test_the_last_word_of_a_client_holds() -> None:
    """ "A tool runs" after an earlier prompt, then "the turn ends"."""
    index = new()
    put(index, run("a", 4))
    index.hint([hint(run("a", 2))], 1.0)
    index.hint([hint(run("a", 4), soon=False)], 2.0)
    put(index, run("b", 6), 3.0)
    put(index, run("x", 4), 4.0)
    assert (lead(index, run("a", 4), 5.0), lead(index, run("b", 6), 5.0)) == (0, 6)


def test_hints_keep_no_more_than_their_part_and_give_way_to_puts() -> None:
    index = new(8)
    put(index, run("a", 4))
    put(index, run("b", 4))
    index.hint([hint(run("a", 4)), hint(run("b", 4))], 1.0)
    assert index.stats().counters.hints_refused == 1  # three quarters of eight blocks are six
    assert put(index, run("x", 8), 2.0) == [PutStatus.RESERVED] * 8
    assert lead(index, run("x", 8), 3.0) == 8
    assert index.stats().counters.hints_yielded == 1


def test_a_tenant_keeps_no_more_than_its_quota() -> None:
    index = new(20)
    for name in "abc":
        put(index, run(name, 4))
    mine = [hint(run(name, 4), tenant="alice", most=8 * SIZE) for name in "abc"]
    index.hint(mine, 1.0)
    assert index.stats().counters.hints_refused == 1
    put(index, run("x", 16), 2.0)
    kept = [lead(index, run(name, 4), 3.0) for name in "abc"]
    assert sum(kept) == 4  # nothing else was left: one run of two gave way
    put(index, run("bob", 4), 4.0)
    index.hint([hint(run("bob", 4), tenant="bob", most=8 * SIZE)], 4.0)
    put(index, run("y", 12), 5.0)
    assert lead(index, run("bob", 4), 6.0) == 4


def test_shared_blocks_count_once() -> None:
    index = new(20)
    runs = [[*run("s", 4), *run(name, 2)] for name in "abc"]
    for names in runs:
        put(index, names)
    index.hint([hint(names, tenant="alice", most=10 * SIZE) for names in runs], 1.0)
    assert index.stats().counters.hints_refused == 0
    put(index, run("x", 10), 2.0)
    assert [lead(index, names, 3.0) for names in runs] == [6, 6, 6]


def test_of_one_tenant_the_nearer_use_wins() -> None:
    index = new(20)
    put(index, run("tool", 4))
    put(index, run("queue", 4))
    most = 4 * SIZE
    index.hint([hint(run("tool", 4), life=60.0, most=most)], 1.0)
    index.hint([hint(run("queue", 4), life=8.0, most=most)], 1.0)
    for number in range(5):
        put(index, run(f"x{number}-", 8), 2.0)
    assert (lead(index, run("tool", 4), 3.0), lead(index, run("queue", 4), 3.0)) == (0, 4)


def test_a_scope_keeps_its_quota_whatever_is_hinted() -> None:
    """Blocks of tenants that call the store themselves are not displaced."""
    quotas = {b"": 10 * SIZE, b"p" * 16: 10 * SIZE}
    policy: QuotaPolicy[None] = QuotaPolicy(LeastRecentlyUsed, quotas, 0)
    index = BlockIndex(IndexOptions(20 * SIZE, FOREVER, b"boot"), policy)
    own = [b"p" * 16 + name.ljust(32, b".") for name in run("own", 10)]
    put(index, own)
    service = [name.ljust(32, b".") for name in run("service", 10)]
    put(index, service)
    index.hint([hint(service[:7]), hint(service[:8])], 1.0)
    more = [name.ljust(32, b".") for name in run("more", 10)]
    put(index, more, 2.0)
    assert lead(index, own, 3.0) == 10


def test_absent_blocks_and_those_behind_a_gap_are_not_kept() -> None:
    index = new()
    put(index, run("a", 4))
    index.hint([hint(run("b", 4)), hint([*run("b", 1), *run("a", 4)]), hint([])], 1.0)
    counters = index.stats().counters
    assert (counters.hints_received, counters.hints_refused) == (3, 0)
    put(index, run("x", 10), 2.0)
    assert lead(index, run("a", 4), 3.0) == 0


def test_the_table_is_bounded() -> None:
    index = new(2 * MAX_RUNS)
    for number in range(MAX_RUNS + 5):
        put(index, run(f"{number}-", 1))
    index.hint([hint(run(f"{number}-", 1)) for number in range(MAX_RUNS + 5)], 1.0)
    assert index.stats().counters.hints_refused == 5


def test_a_removed_block_leaves_no_trace() -> None:
    index = new(4)
    for now in (0.0, 2.0):
        put(index, run("a", 2), now)
        index.hint([hint(run("a", 2)), hint(run("b", 2), soon=False)], now)
        index.clear(now + 1.0)
    put(index, run("a", 2), 4.0)
    put(index, run("x", 4), 5.0)  # were a block still covered, it would stay
    assert lead(index, run("a", 2), 6.0) == 0


@pytest.mark.parametrize("method", ["advance", "used", "removed", "instead_of", "yield_one"])
def test_a_table_that_fails_ends_no_put(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index = new(4)
    put(index, run("a", 2))
    index.hint([hint(run("a", 2))], 1.0)

    def fail(self: HintTable[None], *args: object) -> None:
        raise KeyError(method)

    monkeypatch.setattr(HintTable, method, fail)
    assert put(index, run("x", 4), 2.0) == [PutStatus.RESERVED] * 4
    assert put(index, run("x", 4), 3.0) == [PutStatus.EXISTED] * 4
    assert put(index, run("y", 4), 4.0) == [PutStatus.RESERVED] * 4
    assert index.stats().counters.eviction_failures >= 1


@pytest.mark.parametrize("policy", EVICTIONS)
@pytest.mark.parametrize("seed", range(12))
def test_hints_never_change_what_a_put_may_have(policy: str, seed: int) -> None:
    """Two stores get the same random calls, one of them random hints: no put fails for a hint."""
    chance = random.Random(seed)
    budget = chance.randrange(6, 40)
    plain, hinted = new(budget, policy), new(budget, policy)
    now = 0.0
    for step in range(300):
        now += chance.random() * 10
        name = f"{chance.randrange(8)}-"
        names = [*run("s", chance.randrange(3)), *run(name, chance.randrange(1, 6))]
        names = names[:budget]
        if chance.random() < 0.5:
            most = chance.choice([2 * SIZE, budget * SIZE])
            tenant = chance.choice(["", "alice", "bob"])
            hinted.hint([hint(names, chance.random() < 0.6, 30.0, tenant, most)], now)
        else:
            for index in (plain, hinted):
                statuses = put(index, names, now)
                assert PutStatus.NO_ROOM not in statuses, (seed, step)
                assert lead(index, names, now) == len(names)
        if chance.random() < 0.05:
            hinted.clear(now)
            plain.clear(now)
        for index in (plain, hinted):
            assert index.audit() == []
    assert hinted.stats().counters.eviction_failures == 0


class _Model:
    """A table over blocks of its own, with what it covers."""

    def __init__(self, budget: int) -> None:
        self.index = new(budget)
        self.blocks = {entry.name: entry for entry in self.index.entries(0.0)}
        self.covered: list[bytes] = []
        self.table: HintTable[None] = HintTable(
            self.blocks, self.covered.append, self.covered.remove, HintCounters()
        )

    def fill(self) -> None:
        self.blocks.update({entry.name: entry for entry in self.index.entries(0.0)})


@pytest.mark.parametrize("seed", range(20))
def test_what_hints_keep_is_counted_exactly(seed: int) -> None:
    """Every tenant's bytes against a count from scratch; at the end nothing is left."""
    chance = random.Random(seed)
    model = _Model(200)
    names = [[*run("s", s), *run(f"{s}{n}-", 4)] for s in range(3) for n in range(6)]
    for one in names:
        put(model.index, one)
    model.fill()
    quota = 40 * SIZE
    now = 0.0
    for _ in range(300):
        now += chance.random()
        model.table.advance(now)
        one = chance.choice(names)[: chance.randrange(1, 8)]
        action = chance.random()
        if action < 0.6:
            tenant = chance.choice(["alice", "bob", "carol"])
            life = chance.uniform(0.0, 20.0)
            model.table.receive(hint(one, action < 0.45, life, tenant, 15 * SIZE), quota)
        elif action < 0.75:
            model.table.used(model.blocks[one[-1]])
        elif action < 0.85:
            model.table.yield_one()
        kept: set[bytes] = set()
        for last in model.covered:
            above: bytes | None = last
            while above is not None:
                kept.add(above)
                parent = model.blocks[above].parent
                above = parent if parent in model.blocks else None
        tenants = [model.table.kept(tenant) for tenant in ("alice", "bob", "carol")]
        assert sum(tenants) == len(kept) * SIZE
        assert max(tenants) <= 15 * SIZE
        assert sum(tenants) <= quota * HINTED_SHARE
        assert len(set(model.covered)) == len(model.covered) <= len(model.table)
    model.table.advance(now + 100.0)
    assert (model.covered, len(model.table)) == ([], 0)
    assert [model.table.kept(tenant) for tenant in ("alice", "bob", "carol")] == [0, 0, 0]


def test_a_put_ends_where_blocks_are_charged_to_a_tenant_without_hints() -> None:
    """Two tenants hint at shared blocks; the first one's hint ends and leaves them charged to it.

    Everything else is leased. Giving up hints without end held the whole store.
    """
    index = new(5)
    put(index, [b"a", b"b", b"c"])
    index.hint([hint([b"a", b"b"], tenant="first")], 0.0)
    index.hint([hint([b"a", b"b", b"c"], tenant="second")], 0.0)
    index.get(b"b", 1.0)
    for name in (b"x", b"y"):
        put(index, [name])
        assert index.lookup([name], [], FOREVER, 2.0).lease is not None
    assert put(index, [b"z"], 2.0) == [PutStatus.RESERVED]
    assert lead(index, [b"a", b"b", b"c"], 3.0) == 2
    assert index.audit() == []
