"""The bookkeeping of memory and disk together, without files and threads."""

from __future__ import annotations

import random

import pytest

from kvstore.claims import Claim, ClaimStatus
from kvstore.disk.record import record_bytes
from kvstore.disk.segment_index import DiskLocation, SegmentIndex
from kvstore.disk.tiered_index import TieredIndex
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
    catalog = TieredIndex(
        budget,
        LeastRecentlyUsed(),
        LIFE,
        b"boot",
        ground,
        0,
        SegmentIndex(disk),
        kept_events=1 << 16,
    )
    return catalog, ground


def put(
    catalog: TieredIndex, *names: bytes, now: float = 0.0, partial: bool = False
) -> list[ClaimStatus]:
    grant = catalog.reserve([Claim(name, 10, partial) for name in names], 5.0, now)
    for name, verdict in zip(names, grant.verdicts, strict=True):
        if verdict is ClaimStatus.RESERVED and grant.ticket is not None:
            (lent,) = catalog.borrow(grant.ticket, [name], now)
            assert lent is not None
            assert catalog.commit(grant.ticket, name, lent[1], now)
    return list(grant.verdicts)


def save(catalog: TieredIndex, segment: int, limit: int = 1 << 20) -> int:
    """Everything unsaved into one new segment; how many blocks."""
    batch = catalog.take_unsaved(limit)
    _write(catalog, segment, batch)
    return len(batch)


def _write(catalog: TieredIndex, segment: int, batch: list[IndexEntry[int]]) -> None:
    need = sum(record_bytes(entry.size) for entry in batch)
    while gone := catalog.make_room_below(need, None):
        assert not any(catalog.index.needs(segment) for segment in gone)
    if gone is None:  # all that is in the way is being read
        catalog.not_saved(batch)
        return
    catalog.index.open(segment, 0)
    catalog.saved(segment, need, batch, list(range(len(batch))))


def lead(catalog: TieredIndex, *names: bytes, ttl: float = 0.0, now: float = 0.0) -> int:
    return catalog.lookup(names, [], ttl, now).lead


def arrive(catalog: TieredIndex, good: bool = True) -> int:
    count = 0
    while (wanted := catalog.next_wanted()) is not None:
        catalog.arrived(*wanted, good)
        count += 1
    return count


def test_what_is_evicted_from_memory_is_there_still() -> None:
    catalog, _ = new(30)
    put(catalog, b"a", b"b", b"c")
    assert save(catalog, 1) == 3
    put(catalog, b"d", b"e")
    assert lead(catalog, b"a", b"b", b"c", b"d", b"e") == 5
    assert put(catalog, b"a") == [ClaimStatus.EXISTS]
    stats = catalog.stats()
    assert stats.disk is not None
    assert (stats.entries, stats.disk.entries, stats.disk.unsaved) == (3, 3, 2)
    found = catalog.locate([b"a"], 5.0, 0.0)
    assert found.blocks == (None,)  # it was not asked to come up
    assert catalog.bring([b"a", b"d"], 0.0)
    assert catalog.locate([b"a"], 5.0, 0.0).blocks == (None,)  # its bytes are not there yet
    assert arrive(catalog) == 1
    assert catalog.locate([b"a"], 5.0, 0.0).blocks[0] is not None
    assert not catalog.bring([b"a", b"d"], 0.0)
    assert catalog.audit() == []


def test_a_lease_is_given_on_what_fits_into_memory() -> None:
    catalog, _ = new(60)
    names = [bytes([65 + n]) for n in range(12)]
    for start in (0, 6):
        put(catalog, *names[start : start + 6])
        save(catalog, 1 + start)
    assert lead(catalog, *names) == 12
    held = catalog.lookup(names, [], 5.0, 0.0)
    assert held.lease is not None
    assert held.lead == 3  # half of the memory at a time
    assert arrive(catalog) == 3
    more = catalog.lookup(names, [], 5.0, 0.0)
    assert (more.lead, arrive(catalog)) == (6, 3)  # the others are held already
    assert put(catalog, b"x") == [ClaimStatus.NO_ROOM]
    assert more.lease is not None
    catalog.release(held.lease)
    catalog.release(more.lease)
    assert put(catalog, b"x") == [ClaimStatus.RESERVED]
    assert catalog.audit() == []


def test_a_damaged_block_leaves_every_lease() -> None:
    catalog, ground = new(30)
    put(catalog, b"a", b"b", b"c")
    save(catalog, 1)
    put(catalog, b"x", b"y", b"z")
    held = catalog.lookup([b"a"], [], 50.0, 0.0)
    assert held.lease is not None
    assert arrive(catalog, good=False) == 1
    assert lead(catalog, b"a") == 0
    lent = catalog.lend(held.lease, 0, 1, 0.0)
    assert lent.blocks == ()
    for lease in (held.lease, lent.lease):
        catalog.release(lease or 0)
    stats = catalog.stats()
    assert stats.disk is not None
    assert (stats.leased_bytes, stats.leases, stats.disk.tally.corrupt) == (0, 0, 1)
    told = catalog.events.after(0, 1000)
    assert told is not None
    assert (told[-1][0].name, told[-1][1]) == (b"a", RemovalReason.CORRUPT)
    assert put(catalog, b"a") == [ClaimStatus.RESERVED]
    assert len(ground.free) + len(catalog.entries(0.0)) == ground.count
    assert catalog.audit() == []


def test_what_is_used_in_memory_is_saved_again_when_its_segment_goes() -> None:
    catalog, _ = new(30, 3 * record_bytes(10))
    put(catalog, b"a", b"b", b"c")
    save(catalog, 1)
    lease = catalog.lookup([b"b"], [], 1.0, 0.0).lease
    assert lease is not None
    catalog.release(lease)
    put(catalog, b"d")  # a is evicted from memory, and lies on disk
    batch = catalog.take_unsaved(1 << 20)
    assert [entry.name for entry in batch] == [b"d"]
    _write(catalog, 2, batch)  # there is no room for both segments
    assert lead(catalog, b"a") == 0
    assert [entry.name for entry in catalog.take_unsaved(1 << 20)] == [b"b"]
    assert lead(catalog, b"c") == 1  # in memory only


def test_what_is_evicted_while_it_is_written_gives_its_place_back_later() -> None:
    catalog, ground = new(20, places=2)
    put(catalog, b"a", b"b")
    batch = catalog.take_unsaved(1 << 20)
    assert put(catalog, b"c") == [ClaimStatus.NO_ROOM]  # no place is free before the write ends
    assert ground.free == set()
    _write(catalog, 1, batch)
    assert len(ground.free) == 2
    assert put(catalog, b"c") == [ClaimStatus.RESERVED]
    assert lead(catalog, b"a", b"b", b"c") == 3
    assert catalog.audit() == []


def test_clear_during_a_write_is_final() -> None:
    catalog, ground = new()
    put(catalog, b"a", b"b")
    batch = catalog.take_unsaved(1 << 20)
    catalog.index.open(1, 0)
    assert catalog.clear(0.0) == 2
    catalog.saved(1, 1000, batch, [0, 1])
    assert (lead(catalog, b"a"), lead(catalog, b"b"), len(ground.free)) == (0, 0, ground.count)
    assert catalog.unsaved() == 0
    assert catalog.audit() == []


@pytest.mark.parametrize(("budget", "disk"), [(60, 5), (200, 12), (200, 100)])
def test_random_use_keeps_every_sum_and_every_event(budget: int, disk: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    source = random.Random(seed)
    catalog, ground = new(budget, disk * record_bytes(10), places=budget // 10 + 2)
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
            put(catalog, *picked, now=now, partial=source.random() < 0.1)
        elif action == 3:
            lease = catalog.lookup(picked, [], source.choice([0.0, 3.0]), now).lease
            leases += [] if lease is None else [lease]
        elif action == 4:
            lease = catalog.survey(picked, source.choice([0.0, 3.0]), now).lease
            leases += [] if lease is None else [lease]
        elif action == 5:
            catalog.bring(picked, now)
            lease = catalog.locate(picked, 3.0, now).lease
            leases += [] if lease is None else [lease]
        elif action == 6 and leases:
            catalog.release(leases.pop(source.randrange(len(leases))))
        elif action == 7:
            batches.append(catalog.take_unsaved(source.randrange(1, 60)))
        elif action == 8 and batches:
            batch = batches.pop(source.randrange(len(batches)))
            if not batch or source.random() < 0.2:
                catalog.not_saved(batch)
            else:
                segment += 1
                _write(catalog, segment, batch)
        elif action == 9 and (wanted := catalog.next_wanted()) is not None:
            reads.append(wanted)
        elif action == 10 and reads:
            catalog.arrived(*reads.pop(source.randrange(len(reads))), source.random() < 0.8)
        elif action == 11 and source.random() < 0.1:
            catalog.clear(now)
        elif action == 12 and (found := catalog.examine(picked[0], now)) is not None:
            leases.append(found[1])
            assert catalog.condemn(found[0])
        assert catalog.audit() == []
        catalog.expire(now)
        at = follow(catalog, known, at)
        assert known == content(catalog, now)
    for batch in batches:
        catalog.not_saved(batch)
    while (wanted := catalog.next_wanted()) is not None:
        reads.append(wanted)
    for read in reads:
        catalog.arrived(*read, True)
    for lease in leases:
        catalog.release(lease)
    catalog.clear(now)
    stats = catalog.stats()
    assert stats.disk is not None
    assert (stats.entries, stats.bytes, stats.leases, stats.disk.entries) == (0, 0, 0, 0)
    assert (stats.disk.bytes, stats.disk.unsaved) == (0, 0)
    assert len(ground.free) == ground.count
    assert stats.disk.tally.read > 0
    assert stats.disk.tally.dropped > 0 or disk == 100


def content(catalog: TieredIndex, now: float) -> set[bytes]:
    above = {entry.name for entry in catalog.entries(now)}
    return above | {spot.name for spot in catalog.index.spots()}


def follow(catalog: TieredIndex, known: set[bytes], at: int) -> int:
    """What the events say is there; nothing comes twice and nothing goes that was not there."""
    told = catalog.events.after(at, 1 << 20)
    assert told is not None
    for entry, reason in told:
        assert (entry.name in known) == (reason is not None)
        known.symmetric_difference_update({entry.name})
    return catalog.events.last
