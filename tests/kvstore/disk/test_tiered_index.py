"""The bookkeeping of memory and disk together, without files and threads."""

from __future__ import annotations

import random

import pytest

from kvstore.base import PutStatus
from kvstore.claims import Claim
from kvstore.disk.record import record_bytes
from kvstore.disk.segment_index import DiskLocation, SegmentIndex
from kvstore.disk.tiered_index import TieredIndex
from kvstore.index.block_index import IndexOptions
from kvstore.index.entries import IndexEntry
from kvstore.index.events import RemovalReason
from kvstore.index.eviction.policy import LeastRecentlyUsed

LIFE = 10.0


class Ground:
    """Numbered places, each with one owner at a time."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = set(range(count))

    def take(self, size: int) -> int | None:
        return self.free.pop() if self.free else None

    def give(self, place: int, size: int) -> None:
        assert place not in self.free
        self.free.add(place)


def new(budget: int = 100, disk: int = 1 << 20, places: int = 50) -> tuple[TieredIndex, Ground]:
    ground = Ground(places)
    options = IndexOptions(budget, LIFE, b"boot", events=1 << 16)
    index = TieredIndex(options, LeastRecentlyUsed(), ground, SegmentIndex(disk))
    return index, ground


def put(
    index: TieredIndex, *names: bytes, now: float = 0.0, partial: bool = False
) -> list[PutStatus]:
    grant = index.reserve([Claim(name, 10, partial) for name in names], 5.0, now)
    for name, verdict in zip(names, grant.verdicts, strict=True):
        if verdict is PutStatus.RESERVED and grant.ticket is not None:
            (lent,) = index.borrow(grant.ticket, [name], now)
            assert lent is not None
            assert index.commit(grant.ticket, name, lent[1], now)
    return list(grant.verdicts)


def save(index: TieredIndex, segment: int, limit: int = 1 << 20) -> int:
    """Everything unsaved into one new segment; how many blocks."""
    batch = index.next_writes(limit)
    _write(index, segment, batch)
    return len(batch)


def _write(index: TieredIndex, segment: int, batch: list[IndexEntry[int]]) -> None:
    need = sum(record_bytes(entry.size) for entry in batch)
    while gone := index.make_room_on_disk(need, None):
        assert not any(index.segments.needs(segment) for segment in gone)
    if gone is None:  # all that is in the way is being read
        index.abandon_write(batch)
        return
    index.segments.open(segment, 0)
    index.finish_write(segment, need, batch, list(range(len(batch))))


def lead(index: TieredIndex, *names: bytes, ttl: float = 0.0, now: float = 0.0) -> int:
    return index.lookup(names, [], ttl, now).lead


def arrive(index: TieredIndex, good: bool = True) -> int:
    count = 0
    while (wanted := index.next_read()) is not None:
        index.finish_read(*wanted, good)
        count += 1
    return count


def test_what_is_evicted_from_memory_is_there_still() -> None:
    index, _ = new(30)
    put(index, b"a", b"b", b"c")
    assert save(index, 1) == 3
    put(index, b"d", b"e")
    assert lead(index, b"a", b"b", b"c", b"d", b"e") == 5
    assert put(index, b"a") == [PutStatus.EXISTED]
    stats = index.stats()
    assert stats.disk is not None
    assert (stats.entries, stats.disk.entries, stats.disk.unsaved) == (3, 3, 2)
    found = index.locate([b"a"], 5.0, 0.0)
    assert found.blocks == (None,)  # it was not asked to come up
    assert index.load([b"a", b"d"], 0.0)
    assert index.locate([b"a"], 5.0, 0.0).blocks == (None,)  # its bytes are not there yet
    assert arrive(index) == 1
    assert index.locate([b"a"], 5.0, 0.0).blocks[0] is not None
    assert not index.load([b"a", b"d"], 0.0)
    assert index.audit() == []


def test_a_lease_is_given_on_what_fits_into_memory() -> None:
    index, _ = new(60)
    names = [bytes([65 + n]) for n in range(12)]
    for start in (0, 6):
        put(index, *names[start : start + 6])
        save(index, 1 + start)
    assert lead(index, *names) == 12
    held = index.lookup(names, [], 5.0, 0.0)
    assert held.lease is not None
    assert held.lead == 3  # half of the memory at a time
    assert arrive(index) == 3
    more = index.lookup(names, [], 5.0, 0.0)
    assert (more.lead, arrive(index)) == (6, 3)  # the others are held already
    assert put(index, b"x") == [PutStatus.NO_ROOM]
    assert more.lease is not None
    index.release(held.lease.id)
    index.release(more.lease.id)
    assert put(index, b"x") == [PutStatus.RESERVED]
    assert index.audit() == []


def test_a_damaged_block_leaves_every_lease() -> None:
    index, ground = new(30)
    put(index, b"a", b"b", b"c")
    save(index, 1)
    put(index, b"x", b"y", b"z")
    held = index.lookup([b"a"], [], 50.0, 0.0)
    assert held.lease is not None
    assert arrive(index, good=False) == 1
    assert lead(index, b"a") == 0
    lent = index.lend(held.lease.id, 0, 1, 0.0)
    assert lent.blocks == ()
    for lease in (held.lease, lent.lease):
        index.release(0 if lease is None else lease.id)
    stats = index.stats()
    assert stats.disk is not None
    assert (stats.leased_bytes, stats.leases, stats.disk.counters.corrupt) == (0, 0, 1)
    told = index.events.after(0, 1000)
    assert told is not None
    assert (told[-1][0].name, told[-1][1]) == (b"a", RemovalReason.CORRUPT)
    assert put(index, b"a") == [PutStatus.RESERVED]
    assert len(ground.free) + len(index.entries(0.0)) == ground.count
    assert index.audit() == []


def test_what_is_used_in_memory_is_saved_again_when_its_segment_goes() -> None:
    index, _ = new(30, 3 * record_bytes(10))
    put(index, b"a", b"b", b"c")
    save(index, 1)
    lease = index.lookup([b"b"], [], 1.0, 0.0).lease
    assert lease is not None
    index.release(lease.id)
    put(index, b"d")  # a is evicted from memory, and lies on disk
    batch = index.next_writes(1 << 20)
    assert [entry.name for entry in batch] == [b"d"]
    _write(index, 2, batch)  # there is no room for both segments
    assert lead(index, b"a") == 0
    assert [entry.name for entry in index.next_writes(1 << 20)] == [b"b"]
    assert lead(index, b"c") == 1  # in memory only


def test_what_is_evicted_while_it_is_written_gives_its_place_back_later() -> None:
    index, ground = new(20, places=2)
    put(index, b"a", b"b")
    batch = index.next_writes(1 << 20)
    assert put(index, b"c") == [PutStatus.NO_ROOM]  # no place is free before the write ends
    assert ground.free == set()
    _write(index, 1, batch)
    assert len(ground.free) == 2
    assert put(index, b"c") == [PutStatus.RESERVED]
    assert lead(index, b"a", b"b", b"c") == 3
    assert index.audit() == []


def test_clear_during_a_write_is_final() -> None:
    index, ground = new()
    put(index, b"a", b"b")
    batch = index.next_writes(1 << 20)
    index.segments.open(1, 0)
    assert index.clear(0.0) == 2
    index.finish_write(1, 1000, batch, [0, 1])
    assert (lead(index, b"a"), lead(index, b"b"), len(ground.free)) == (0, 0, ground.count)
    assert index.unsaved() == 0
    assert index.audit() == []


@pytest.mark.parametrize(("budget", "disk"), [(60, 5), (200, 12), (200, 100)])
def test_random_use_keeps_every_sum_and_every_event(budget: int, disk: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    source = random.Random(seed)
    index, ground = new(budget, disk * record_bytes(10), places=budget // 10 + 2)
    names, now, segment, at = [bytes([n]) for n in range(40)], 0.0, 0, 0
    leases: list[int] = []
    batches: list[list[IndexEntry[int]]] = []
    reads: list[tuple[IndexEntry[int], DiskLocation]] = []
    known: set[bytes] = set()
    for _ in range(4000):
        now += source.random() / 4
        picked = source.sample(names, source.randrange(1, 6))
        action = source.randrange(13)
        if action < 3:
            put(index, *picked, now=now, partial=source.random() < 0.1)
        elif action == 3:
            lease = index.lookup(picked, [], source.choice([0.0, 3.0]), now).lease
            leases += [] if lease is None else [lease.id]
        elif action == 4:
            lease = index.survey(picked, source.choice([0.0, 3.0]), now).lease
            leases += [] if lease is None else [lease.id]
        elif action == 5:
            index.load(picked, now)
            lease = index.locate(picked, 3.0, now).lease
            leases += [] if lease is None else [lease.id]
        elif action == 6 and leases:
            index.release(leases.pop(source.randrange(len(leases))))
        elif action == 7:
            batches.append(index.next_writes(source.randrange(1, 60)))
        elif action == 8 and batches:
            batch = batches.pop(source.randrange(len(batches)))
            if not batch or source.random() < 0.2:
                index.abandon_write(batch)
            else:
                segment += 1
                _write(index, segment, batch)
        elif action == 9 and (wanted := index.next_read()) is not None:
            reads.append(wanted)
        elif action == 10 and reads:
            index.finish_read(*reads.pop(source.randrange(len(reads))), source.random() < 0.8)
        elif action == 11 and source.random() < 0.1:
            index.clear(now)
        elif action == 12 and (found := index.hold_for_check(picked[0], now)) is not None:
            leases.append(found[1].id)
            assert index.remove_corrupt(found[0])
        assert index.audit() == []
        index.expire(now)
        at = follow(index, known, at)
        assert known == content(index, now)
    for batch in batches:
        index.abandon_write(batch)
    while (wanted := index.next_read()) is not None:
        reads.append(wanted)
    for read in reads:
        index.finish_read(*read, True)
    for number in leases:
        index.release(number)
    index.clear(now)
    stats = index.stats()
    assert stats.disk is not None
    assert (stats.entries, stats.bytes, stats.leases, stats.disk.entries) == (0, 0, 0, 0)
    assert (stats.disk.bytes, stats.disk.unsaved) == (0, 0)
    assert len(ground.free) == ground.count
    assert stats.disk.counters.read > 0
    assert stats.disk.counters.dropped > 0 or disk == 100


def content(index: TieredIndex, now: float) -> set[bytes]:
    above = {entry.name for entry in index.entries(now)}
    return above | {location.name for location in index.segments.locations()}


def follow(index: TieredIndex, known: set[bytes], at: int) -> int:
    """What the events say is there; nothing comes twice and nothing goes that was not there."""
    told = index.events.after(at, 1 << 20)
    assert told is not None
    for entry, reason in told:
        assert (entry.name in known) == (reason is not None)
        known.symmetric_difference_update({entry.name})
    return index.events.last
