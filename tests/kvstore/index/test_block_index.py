"""The store's bookkeeping, with a clock of the test's own."""

from __future__ import annotations

import random
import sys
import tracemalloc
from types import FrameType

import pytest

from kvstore.base import PutStatus, Tail
from kvstore.claims import Claim
from kvstore.index.block_index import BlockIndex, IndexOptions
from kvstore.index.eviction import make_policy
from kvstore.index.eviction.expected_returns import ExpectedReturns
from kvstore.index.eviction.policy import LeastRecentlyUsed
from kvstore.index.eviction.victims import SafePolicy
from kvstore.index.tombstones import Tombstones
from kvstore.limits import EVICTIONS, ReservationShares

BOOT = b"boot"
LIFE = 10.0


def new(budget: int = 100) -> BlockIndex[str]:
    return BlockIndex(IndexOptions(budget, LIFE, BOOT), LeastRecentlyUsed())


def claim(name: bytes, size: int = 10, partial: bool = False) -> Claim:
    return Claim(name, size, partial)


def put(index: BlockIndex[str], *names: bytes, size: int = 10, now: float = 0.0) -> list[PutStatus]:
    grant = index.reserve([claim(name, size) for name in names], 5.0, now)
    for name, verdict in zip(names, grant.verdicts, strict=True):
        if verdict is PutStatus.RESERVED:
            assert grant.ticket is not None
            assert index.commit(grant.ticket, name, name.decode("latin-1"), now)
    return list(grant.verdicts)


def lead(index: BlockIndex[str], *names: bytes, now: float = 0.0) -> int:
    return index.lookup(names, [], 0.0, now).lead


def test_a_block_is_there_only_after_commit() -> None:
    index = new()
    grant = index.reserve([claim(b"a")], 5.0, 0.0)
    assert grant.ticket is not None
    assert (lead(index, b"a"), index.get(b"a", 0.0)) == (0, None)
    assert index.commit(grant.ticket, b"a", "A", 1.0)
    assert (lead(index, b"a"), index.get(b"a", 1.0)) == (1, "A")
    assert not index.commit(grant.ticket, b"a", "reused", 1.0)


def test_a_block_that_cannot_have_room_costs_no_other() -> None:
    index: BlockIndex[str] = BlockIndex(
        IndexOptions(100, LIFE, BOOT, entry_bytes=5), LeastRecentlyUsed()
    )
    put(index, b"a", b"b", b"c", b"d", size=15)
    assert put(index, b"x", size=96) == [PutStatus.NO_ROOM]
    index.survey([b"a", b"b"], 50.0, 0.0)
    assert put(index, b"x", size=56) == [PutStatus.NO_ROOM]
    assert (lead(index, b"a", b"b", b"c", b"d"), index.counters.evicted) == (4, 0)
    assert put(index, b"x", size=55) == [PutStatus.RESERVED]
    assert (lead(index, b"a", b"b"), index.counters.evicted) == (2, 2)
    assert index.audit() == []


def test_one_writer_at_a_time() -> None:
    index = new()
    first = index.reserve([claim(b"a")], 5.0, 0.0)
    second = index.reserve([claim(b"a"), claim(b"b")], 5.0, 0.0)
    assert first.ticket is not None
    assert second.verdicts == (PutStatus.PENDING, PutStatus.RESERVED)
    assert second.ticket is not None
    assert not index.commit(second.ticket, b"a", "stolen", 0.0)
    index.abandon(first.ticket)
    assert index.reserve([claim(b"a")], 5.0, 0.0).verdicts == (PutStatus.RESERVED,)
    assert index.counters.abandoned == 1


def test_a_writer_that_stands_still_loses_its_reservation() -> None:
    index = new()
    grant = index.reserve([claim(b"a", 60), claim(b"b", 40)], 5.0, 0.0)
    assert grant.ticket is not None
    assert put(index, b"c", now=4.9) == [PutStatus.NO_ROOM]
    index.reservations.extend_ticket(grant.ticket, 8.0)
    assert index.commit(grant.ticket, b"a", "A", 7.0)
    assert put(index, b"c", size=30, now=8.1) == [PutStatus.RESERVED]
    assert not index.commit(grant.ticket, b"b", "B", 8.2)
    assert index.audit() == []


def test_eviction_spares_what_is_used_held_and_reserved() -> None:
    index = new(40)
    put(index, b"a", b"b", b"c", b"d")
    assert index.get(b"a", 1.0) == "a"
    held = index.lookup([b"b"], [], 100.0, 2.0)
    assert held.lease is not None
    put(index, b"e", now=3.0)
    assert [lead(index, name) for name in (b"a", b"b", b"c", b"d", b"e")] == [1, 1, 0, 1, 1]
    assert put(index, b"f", size=31, now=4.0) == [PutStatus.NO_ROOM]
    assert index.counters.evicted == 1  # nothing was evicted in vain
    assert put(index, b"f", size=30, now=4.0) == [PutStatus.RESERVED]
    assert lead(index, b"b") == 1
    assert index.audit() == []


def test_of_one_run_the_last_block_goes_first() -> None:
    index = new(40)
    put(index, b"d", b"c", b"b", b"a")
    lease = index.lookup([b"a", b"b", b"c"], [], 10.0, 0.0).lease
    assert lease is not None
    index.release(lease.id)
    order = []
    for name in (b"1", b"2", b"3", b"4"):
        before = {n for n in (b"a", b"b", b"c", b"d") if lead(index, n)}
        put(index, name)
        order += [n for n in before if not index.lookup([n], [], 0.0, 0.0).lead]
    assert order == [b"d", b"c", b"b", b"a"]


@pytest.mark.parametrize("policy", EVICTIONS)
def test_memory_beside_the_budget_is_counted_and_does_not_grow(policy: str) -> None:
    """Evicted leaves were kept for ever while LRU decided: 208 bytes and more a block."""
    index: BlockIndex[int] = BlockIndex(
        IndexOptions(200, 60.0, b"boot", events=4000), make_policy(policy)
    )
    index._tombstones = Tombstones(4000)
    chosen = index._entries.policy
    if isinstance(chosen, SafePolicy) and isinstance(chosen._policy, ExpectedReturns):
        chosen._policy._remembered = 4000

    def put_many(first: int, count: int) -> None:
        for number in range(first, first + count):
            name = number.to_bytes(32, "big")
            parent = (number - 1).to_bytes(32, "big") if number % 10 else None
            grant = index.reserve([Claim(name, 1, False, None, parent)], 30.0, number / 100)
            index.commit(grant.ticket or 0, name, 0, number / 100, parent)

    put_many(0, 200)
    tracemalloc.start()
    try:
        before, counted = tracemalloc.get_traced_memory()[0], index.stats().overhead_bytes
        put_many(200, 10_000)
        used = tracemalloc.get_traced_memory()[0] - before
        counted = index.stats().overhead_bytes - counted
        assert 0.6 * used < counted < 1.6 * used
        put_many(10_200, 10_000)
        assert tracemalloc.get_traced_memory()[0] - before < 1.2 * used
    finally:
        tracemalloc.stop()


def test_leases_end_by_their_deadline_and_count() -> None:
    index = new()
    put(index, b"a", b"b")
    one = index.lookup([b"a", b"b"], [], 5.0, 0.0)
    two = index.lookup([b"a"], [], 50.0, 0.0)
    assert one.lease != two.lease
    assert index.clear(4.9) == 0
    assert index.clear(5.0) == 1
    assert two.lease is not None
    index.release(two.lease.id)
    index.release(two.lease.id)
    assert index.clear(6.0) == 1
    assert index.stats().leases == 0
    assert index.audit() == []


def test_partial_blocks_live_shortly_unless_they_are_used_or_held() -> None:
    index = new()
    grant = index.reserve([claim(n, 10, partial=True) for n in (b"a", b"b", b"c")], 5.0, 0.0)
    for name in (b"a", b"b", b"c"):
        assert grant.ticket is not None
        index.commit(grant.ticket, name, "", 0.0)
    index.lookup([b"b"], [], 100.0, 1.0)
    assert index.get(b"c", 9.0) == ""
    assert [lead(index, n, now=12.0) for n in (b"a", b"b", b"c")] == [0, 1, 1]
    assert lead(index, b"c", now=23.0) == 0
    assert lead(index, b"b", now=99.0) == 1
    assert lead(index, b"b", now=120.0) == 0
    assert index.counters.expired == 3
    assert index.audit() == []


def test_tails_follow_the_run_they_belong_to() -> None:
    index = new()
    put(index, b"a", b"b", b"t", b"u")
    tails = [Tail(3, b"t"), Tail(2, b"x"), Tail(2, b"u"), Tail(2, b"t")]
    found = index.lookup([b"a", b"b", b"c"], tails, 1.0, 0.0)
    assert (found.lead, found.tail, len(found.sizes)) == (2, 2, 3)
    assert index.lookup([b"x"], [Tail(0, b"a")], 0.0, 0.0).tail == 0


def test_a_run_goes_from_its_end_even_if_put_and_used_in_parts() -> None:
    index = new(40)
    for name, parent in ((b"a", None), (b"b", b"a"), (b"c", b"b"), (b"x", None)):
        grant = index.reserve([claim(name)], 5.0, 0.0)
        assert grant.ticket is not None
        index.commit(grant.ticket, name, "", 0.0, parent)
    index.get(b"c", 0.0)
    index.get(b"x", 0.0)
    order = []
    for name in (b"1", b"2", b"3"):
        before = {n for n in (b"a", b"b", b"c", b"x") if lead(index, n)}
        put(index, name)
        order += [n for n in before if not lead(index, n)]
    assert order == [b"c", b"b", b"a"]


def test_what_is_followed_by_what_is_held_goes_when_nothing_else_can() -> None:
    index = new(20)
    for name, parent in ((b"a", None), (b"b", b"a")):
        grant = index.reserve([claim(name)], 5.0, 0.0)
        assert grant.ticket is not None
        index.commit(grant.ticket, name, "", 0.0, parent)
    assert index.lookup([b"b"], [], 10.0, 0.0).lease is not None
    assert put(index, b"c") == [PutStatus.RESERVED]
    assert [lead(index, name) for name in (b"a", b"b", b"c")] == [0, 1, 1]


def test_the_bookkeeping_is_paid_from_the_budget() -> None:
    index: BlockIndex[str] = BlockIndex(
        IndexOptions(100, LIFE, BOOT, entry_bytes=15), LeastRecentlyUsed()
    )
    put(index, b"a", b"b", b"c", b"d")
    assert lead(index, b"a", b"b", b"c", b"d") == 4
    put(index, b"e")
    stats = index.stats()
    assert (stats.entries, stats.bytes) == (4, 40)


def test_a_lookup_does_as_much_among_many_blocks() -> None:
    """Counted in calls, not in seconds: those are in benchmarks/README.md."""

    def calls(blocks: int) -> int:
        index = new(blocks * 10)
        names = [n.to_bytes(32, "little") for n in range(blocks)]
        for start in range(0, blocks, 1000):
            put(index, *names[start : start + 1000])
        made = 0

        def count(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal made
            made += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            lease = index.lookup(names[:1000], [], 1.0, 0.0).lease
        finally:
            sys.setprofile(None)
        assert lease is not None
        return made

    assert 1000 < calls(20_000) == calls(1000)


@pytest.mark.parametrize("budget", [50, 200, 1000])
def test_random_use_keeps_every_sum(budget: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    source = random.Random(seed)
    index, now = new(budget), 0.0
    tickets: list[tuple[int, bytes]] = []
    leases: list[int] = []
    names = [bytes([n]) for n in range(40)]
    for _ in range(4000):
        now += source.random()
        picked = source.sample(names, source.randrange(1, 6))
        action = source.randrange(8)
        if action == 0:
            claims = [claim(n, source.randrange(1, 30), source.random() < 0.3) for n in picked]
            grant = index.reserve(claims, source.random() * 4, now)
            if grant.ticket is not None:
                tickets += [(grant.ticket, name) for name in picked]
        elif action in (1, 2) and tickets:
            ticket, name = tickets.pop(source.randrange(len(tickets)))
            index.commit(ticket, name, "x", now)
        elif action == 3 and tickets:
            index.abandon(source.choice(tickets)[0])
        elif action == 4:
            lease = index.lookup(picked, [], source.random() * 6, now).lease
            leases += [] if lease is None else [lease.id]
        elif action == 5 and leases:
            index.release(leases.pop(source.randrange(len(leases))))
        elif action == 6 and (found := index.hold_for_check(picked[0], now)) is not None:
            leases.append(found[1].id)
            assert index.remove_corrupt(found[0])
        else:
            index.get(picked[0], now)
        assert index.audit() == []
    for ticket, _ in tickets:
        index.abandon(ticket)
    for number in leases:
        index.release(number)
    index.clear(now)
    stats = index.stats()
    assert (stats.entries, stats.bytes, stats.leases, stats.reservations) == (0, 0, 0, 0)
    assert index.audit() == []


def test_a_reservation_takes_no_more_than_its_share() -> None:
    """What is asked for beyond it is for another ticket; nothing is evicted for it."""
    shares = ReservationShares(ticket=1 / 4, all=1 / 2)
    index: BlockIndex[str] = BlockIndex(
        IndexOptions(80, 60.0, b"boot", shares=shares), LeastRecentlyUsed()
    )
    for number in range(8):
        put(index, bytes([65 + number]))
    claims = [Claim(bytes([97 + n]), 10, False) for n in range(8)]
    first = index.reserve(claims, 30.0, 1.0)
    assert first.verdicts == (PutStatus.RESERVED,) * 2 + (PutStatus.PENDING,) * 6
    second = index.reserve(claims[2:], 30.0, 1.0)
    assert second.verdicts == (PutStatus.RESERVED,) * 2 + (PutStatus.PENDING,) * 4
    third = index.reserve(claims[4:], 30.0, 1.0)
    assert third.verdicts[0] is PutStatus.NO_ROOM
    assert index.stats().entries == 4
    assert first.ticket is not None
    index.abandon(first.ticket)
    assert index.reserve(claims[4:], 30.0, 1.0).verdicts[0] is PutStatus.RESERVED
    assert index.audit() == []


def test_a_block_larger_than_the_share_is_taken_alone() -> None:
    shares = ReservationShares(ticket=1 / 4, all=1 / 2)
    index: BlockIndex[str] = BlockIndex(
        IndexOptions(80, 60.0, b"boot", shares=shares), LeastRecentlyUsed()
    )
    claims = [Claim(b"x", 60, False), Claim(b"y", 10, False)]
    grant = index.reserve(claims, 30.0, 1.0)
    assert grant.verdicts == (PutStatus.RESERVED, PutStatus.PENDING)
    assert index.reserve(claims[1:], 30.0, 1.0).verdicts == (PutStatus.NO_ROOM,)
