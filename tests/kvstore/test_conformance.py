"""What every store does, whatever its URL."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvrelay.block.header import decode, encode
from kvrelay.block.mac import BlockKey
from kvrelay.block.name import FAMILY_MASK
from kvrelay.block.verify import verify_block, verify_payload
from kvrelay.errors import Corrupt, Rejected
from kvrelay.usage import Miss
from kvstore import Block, Offer, PutStatus, Store, SurveyResult, Tail, Want, connect
from kvstore.base import NameQuery
from kvstore.multi.store import MultiStore
from tests.kvstore.conftest import BUDGET, ours_only
from tests.kvstore.rig import TIMEOUT, chain, get, make, name_of, offer, present, put, sealed, why

Connect = Callable[[], Store]


@pytest.mark.parametrize("size", [0, 1, 4096, 262_144, 2 << 20, (5 << 20) + 3])
def test_what_is_put_comes_back(store: Store, size: int) -> None:
    block = make(size)
    assert put(store, block) == [PutStatus.STORED]
    assert get(store, block)[0].header is not None


def test_signed_blocks_come_without_a_checksum(store: Store) -> None:
    """The tag proves the payload: nothing is summed on the way, whatever the transport."""
    key = BlockKey(b"k" * 32)
    sizes = [0, 1, 4096, 262_144, 524_288, 524_289, 3 << 20, (3 << 20) + 3]
    blocks = [sealed(make(size), key) for size in sizes]
    assert set(put(store, *blocks)) == {PutStatus.STORED}
    wants = [Want(name_of(b), memoryview(bytearray(b.payload.nbytes)), key=key) for b in blocks]
    for got in store.get(wants, TIMEOUT):
        assert got.header == blocks[got.index].header
        assert got.summed is None
        assert wants[got.index].buffer == blocks[got.index].payload
        verify_block(got.header, decode(got.header), wants[got.index].buffer, got.summed, key)


def test_many_blocks_of_mixed_sizes_in_one_call(store: Store) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    source = random.Random(seed)
    blocks = [make(source.choice([10, 5_000, 70_000, 3 << 20]), count=7) for _ in range(8)]
    blocks += [make(source.randrange(3000), count=source.randrange(200)) for _ in range(300)]
    source.shuffle(blocks)
    blocks = blocks[:60] if sum(b.size for b in blocks) > 15 << 20 else blocks
    assert set(put(store, *blocks)) == {PutStatus.STORED}
    assert all(got.header is not None for got in get(store, *blocks))


def test_put_is_create_only(store: Store) -> None:
    first = make()
    second = make(like=first)
    assert put(store, first) == [PutStatus.STORED]
    assert put(store, second, make()) == [PutStatus.EXISTED, PutStatus.STORED]
    get(store, first)


def test_a_large_block_that_exists_is_not_read_again(store: Store) -> None:
    block = make(1 << 20)

    def read() -> Block:
        raise AssertionError("nobody wanted it")

    put(store, block)
    outcomes = store.put([Offer(name_of(block), block.size, False, read)], TIMEOUT)
    assert outcomes[0].status is PutStatus.EXISTED


def test_absent_blocks_are_told_and_the_others_come(store: Store) -> None:
    there, absent = make(), make()
    put(store, there)
    gots = get(store, absent, there, absent)
    assert [got.header is not None for got in gots] == [False, True, False]


def test_a_block_of_another_length_is_not_written_into_the_buffer(store: Store) -> None:
    block, after = make(1000), make(50)
    put(store, block, after)
    too_long = memoryview(bytearray(2000))
    rest = memoryview(bytearray(50))
    gots = list(store.get([Want(name_of(block), too_long), Want(name_of(after), rest)], TIMEOUT))
    assert gots[0].header == b""  # absent blocks have none
    assert rest == after.payload


def test_a_get_can_be_left_early(store: Store) -> None:
    blocks = [make(1 << 20) for _ in range(8)]
    put(store, *blocks)
    wants = [Want(name_of(b), memoryview(bytearray(1 << 20))) for b in blocks]
    generator = store.get(wants, TIMEOUT)
    assert next(generator).header is not None
    generator.close()
    assert all(got.header is not None for got in get(store, *blocks))


def test_nothing_is_asked_and_nothing_is_answered(store: Store) -> None:
    assert store.put([], TIMEOUT) == []
    assert list(store.get([], TIMEOUT)) == []
    found = store.lookup(NameQuery([], ttl=1.0), TIMEOUT)
    assert (found.lead, found.tail, found.lease) == (0, None, None)


def test_lookup_answers_the_leading_run(store: Store) -> None:
    blocks = [make(100 + i) for i in range(6)]
    put(store, *blocks[:3], *blocks[4:])
    found = store.lookup(NameQuery([name_of(b) for b in blocks]), TIMEOUT)
    assert found.lead == 3
    assert found.sizes == tuple(b.size for b in blocks[:3])
    assert found.lease is None


def test_a_survey_tells_of_each_block(store: Store) -> None:
    blocks = [make(100 + i) for i in range(6)]
    put(store, *blocks[:2], blocks[3], blocks[5])
    names = [name_of(b) for b in (*blocks, blocks[3])]
    there = [0, 1, 3, 5, 6]
    seen = store.survey(NameQuery(names, ttl=60), TIMEOUT)
    sizes = [b.size for b in (*blocks, blocks[3])]
    assert seen.sizes == tuple(size if i in there else None for i, size in enumerate(sizes))
    assert seen.lease is not None
    assert store.survey(NameQuery(names), TIMEOUT) == SurveyResult(seen.sizes, None)
    store.release([seen.lease], TIMEOUT)
    assert store.stats(TIMEOUT).leases == 0
    store.clear(TIMEOUT)
    assert store.survey(NameQuery(names, ttl=60), TIMEOUT) == SurveyResult((None,) * 7, None)
    assert store.survey(NameQuery([], ttl=60), TIMEOUT) == SurveyResult((), None)


@ours_only
def test_a_survey_holds_what_is_there(store: Store) -> None:
    block, absent = make(), make()
    put(store, block)
    names = [name_of(absent), name_of(block)]
    seen = store.survey(NameQuery(names, ttl=60), TIMEOUT)
    assert seen.lease is not None
    store.clear(TIMEOUT)
    assert store.survey(NameQuery(names), TIMEOUT) == SurveyResult(seen.sizes, None)
    store.release([seen.lease], TIMEOUT)
    store.clear(TIMEOUT)
    assert store.survey(NameQuery(names), TIMEOUT) == SurveyResult((None, None), None)


def test_the_first_tail_after_the_run_is_taken(store: Store) -> None:
    run = [make() for _ in range(3)]
    tails = [make(count=1) for _ in range(4)]
    put(store, *run, *tails[1:])
    names = [name_of(b) for b in run]

    def tail(after: int, *which: int) -> int | None:
        wanted = [Tail(after, name_of(tails[i])) for i in which]
        return store.lookup(NameQuery(names, wanted), TIMEOUT).tail

    assert tail(3, 0, 1, 2) == 1
    assert tail(3, 2, 1) == 0
    assert tail(3, 0) is None
    assert tail(2, 1) is None
    found = store.lookup(NameQuery(names, [Tail(3, name_of(tails[1]))], ttl=1.0), TIMEOUT)
    assert len(found.sizes) == 4
    assert found.lease is not None
    store.release([found.lease], TIMEOUT)


def test_a_block_whose_bytes_are_wrong_is_refused_by_field(store: Store) -> None:
    block, other = make(), make()
    payload = bytearray(block.payload)
    payload[7] ^= 1
    header = bytearray(block.header)
    header[-1] ^= 1
    lie = dataclasses.replace(decode(block.header), shape=(4, 1), payload_bytes=4)
    cases = {
        "payload_checksum": Block(block.header, memoryview(payload)),
        "header_checksum": Block(bytes(header), block.payload),
        "name": Block(other.header, block.payload),
        "payload_bytes": Block(encode(lie), block.payload),
        "magic": Block(bytes(len(block.header)), block.payload),
    }
    before = store.stats(TIMEOUT).counters.corrupt
    for field, wrong in cases.items():
        wanted = offer(wrong, name_of(block))
        outcome, beside = store.put([wanted, offer(make())], TIMEOUT)
        assert (outcome.status, beside.status) == (PutStatus.CORRUPT, PutStatus.STORED)
        assert outcome.reason is not None
        assert outcome.reason.startswith(field + ":")
    assert store.stats(TIMEOUT).counters.corrupt == before + len(cases)
    assert present(store, block) == [False]
    assert put(store, block) == [PutStatus.STORED]


def test_a_name_that_does_not_follow_from_the_header_is_refused(store: Store) -> None:
    """Nobody can put a block in the place of another by saying so in its header."""
    block, victim = make(), make()
    false = [
        dataclasses.replace(decode(block.header), name=name_of(victim)),
        dataclasses.replace(decode(block.header), parent=b"q" * 32),
        dataclasses.replace(decode(block.header), tokens=(0, 1, 2, 4)),
        dataclasses.replace(decode(block.header), namespace=b"m" * 32),
    ]
    for header in false:
        wrong = Block(encode(header), block.payload)
        (outcome,) = store.put([offer(wrong)], TIMEOUT)
        assert outcome.status is PutStatus.CORRUPT
        assert outcome.reason is not None
        assert outcome.reason.startswith("name: ")
    assert present(store, block, victim) == [False, False]
    assert put(store, block, victim) == [PutStatus.STORED] * 2


def test_of_a_run_put_in_parts_the_tail_goes_first(plain_store: Store) -> None:
    store = plain_store
    run = [make(3 << 20)]
    put(store, run[0])
    for _ in range(3):
        run.append(make(3 << 20, parent=name_of(run[-1])))
        put(store, run[-1])
    other = make(3 << 20)
    put(store, other)
    assert present(store, *run, other) == [True] * 5
    newer = [make(3 << 20), make(3 << 20)]
    put(store, newer[0])
    assert present(store, *run, other) == [True, True, True, False, True]
    put(store, newer[1])
    assert present(store, *run, other, *newer) == [True, True, False, False, True, True, True]


def test_least_recently_used_goes_first(plain_store: Store) -> None:
    store = plain_store
    blocks = [make(4 << 20) for _ in range(3)]
    put(store, *blocks)
    get(store, blocks[0])
    assert put(store, make(4 << 20)) == [PutStatus.STORED]
    assert present(store, *blocks) == [True, False, True]
    assert store.stats(TIMEOUT).eviction == "lru"


@ours_only
def test_a_lease_outlives_eviction_and_clear(store: Store) -> None:
    held, other = make(6 << 20), make(6 << 20)
    put(store, held, other)
    found = store.lookup(NameQuery([name_of(held)], ttl=60.0), TIMEOUT)
    assert found.lease is not None
    assert [put(store, make(6 << 20)) for _ in range(3)] == [[PutStatus.STORED]] * 3
    assert present(store, held, other) == [True, False]
    store.clear(TIMEOUT)
    assert present(store, held) == [True]
    assert store.stats(TIMEOUT).leases == 1
    store.release([found.lease], TIMEOUT)
    store.clear(TIMEOUT)
    assert present(store, held) == [False]


@ours_only
def test_a_lease_does_not_outlive_its_deadline(store: Store) -> None:
    held = make(6 << 20)
    put(store, held)
    found = store.lookup(NameQuery([name_of(held)], ttl=0.3), TIMEOUT)
    assert found.lease is not None
    while time.monotonic() < found.lease.deadline + 0.3:
        threading.Event().wait(0.05)
    assert store.stats(TIMEOUT).leases == 0
    store.clear(TIMEOUT)
    assert present(store, held) == [False]


@ours_only
def test_no_room_beside_what_is_held(store: Store) -> None:
    held = [make(7 << 20), make(7 << 20)]
    put(store, *held)
    found = store.lookup(NameQuery([name_of(b) for b in held], ttl=60), TIMEOUT)
    assert found.lease is not None
    assert put(store, make(7 << 20), make(100)) == [PutStatus.NO_ROOM, PutStatus.STORED]
    store.release([found.lease], TIMEOUT)
    store.release([found.lease], TIMEOUT)
    assert put(store, make(7 << 20)) == [PutStatus.STORED]


@ours_only
@pytest.mark.parametrize("size", [40_000, 1_500_000])
def test_prompts_longer_than_the_store_put_in_turns_keep_their_heads(
    store: Store, size: int
) -> None:
    """Each evicted the other's last blocks and then its own first ones: none was found."""
    count = BUDGET * 3 // 2 // size
    chains = [chain(count, size), chain(count, size)]
    for start in range(0, count, 5):
        for offers in chains:
            store.put(offers[start : start + 5], TIMEOUT)
    names = [[one.name for one in offers] for offers in chains]
    found = sum(store.lookup(NameQuery(each), TIMEOUT).lead for each in names)
    stats = store.stats(TIMEOUT)
    assert found * size > 0.85 * BUDGET
    assert (stats.entries, stats.reservations) == (found, 0)
    assert stats.counters.orphaned > 0


@ours_only
def test_leases_of_another_start_are_ignored(store: Store) -> None:
    block = make()
    put(store, block)
    found = store.lookup(NameQuery([name_of(block)], ttl=60), TIMEOUT)
    assert found.lease is not None
    store.release([dataclasses.replace(found.lease, boot=b"another")], TIMEOUT)
    assert store.stats(TIMEOUT).leases == 1
    store.release([found.lease], TIMEOUT)
    assert store.stats(TIMEOUT).leases == 0


@ours_only
def test_concurrent_puts_of_one_name_cost_one_copy(connecting: Connect) -> None:
    stores = [connecting() for _ in range(4)]
    blocks = [make(700_000) for _ in range(10)]
    before = stores[0].stats(TIMEOUT).counters
    results: list[list[PutStatus]] = []
    threads = [threading.Thread(target=lambda s=s: results.append(put(s, *blocks))) for s in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(kept in (PutStatus.STORED, PutStatus.EXISTED) for kepts in results for kept in kepts)
    stats = stores[0].stats(TIMEOUT)
    assert stats.counters.stored - before.stored == 10
    assert stats.counters.bytes_in - before.bytes_in == sum(b.size for b in blocks)
    assert (stats.reservations, stats.reserved_bytes) == (0, 0)
    get(stores[1], *blocks)


@ours_only
def test_a_block_is_not_visible_before_it_is_whole(connecting: Connect) -> None:
    writer, reader = connecting(), connecting()
    block = make(5 << 20)
    reading, go_on = threading.Event(), threading.Event()

    def slow() -> Block:
        reading.set()
        go_on.wait(TIMEOUT)
        return block

    wanted = Offer(name_of(block), block.size, False, slow)
    thread = threading.Thread(target=writer.put, args=([wanted], TIMEOUT))
    thread.start()
    reading.wait(TIMEOUT)
    assert present(reader, block) == [False]
    assert get(reader, block)[0].header is None
    assert reader.stats(TIMEOUT).reservations == 1
    go_on.set()
    assert put(reader, block) == [PutStatus.EXISTED]
    thread.join()
    assert present(reader, block) == [True]


def test_stats_count_what_happened(store: Store) -> None:
    store.clear(TIMEOUT)
    before = store.stats(TIMEOUT)
    block = make()
    put(store, block)
    put(store, block)
    get(store, block, make())
    store.lookup(NameQuery([name_of(block), b"x" * 32]), TIMEOUT)
    after = store.stats(TIMEOUT)
    assert after.entries == before.entries + 1
    changes = {
        field.name: getattr(after.counters, field.name) - getattr(before.counters, field.name)
        for field in dataclasses.fields(after.counters)
    }
    moved = {
        "stored": 1,
        "existed": 1,
        "served": 1,
        "bytes_in": block.size,
        "bytes_out": block.size,
    }
    asked = {"absent": 1, "lookups": 1, "hits": 1, "misses": 1}
    if isinstance(store, MultiStore):  # it asks all its stores, and before a get too
        assert {name: change for name, change in changes.items() if name in moved} == moved
    else:
        assert {name: n for name, n in changes.items() if n} == {**moved, **asked}
    assert store.clear(TIMEOUT) == 1
    assert store.stats(TIMEOUT).entries == before.entries


@ours_only
def test_bytes_are_counted_to_the_last(store: Store) -> None:
    block = make()
    before = store.stats(TIMEOUT).bytes
    put(store, block)
    assert store.stats(TIMEOUT).bytes == before + block.size
    store.clear(TIMEOUT)
    assert store.stats(TIMEOUT).bytes == 0


def test_what_comes_out_would_be_seen_if_it_were_wrong(store: Store) -> None:
    """The reader's check works on what a store gives, not only on what was put."""
    block = make()
    put(store, block)
    buffer = memoryview(bytearray(block.payload.nbytes))
    (got,) = store.get([Want(name_of(block), buffer)], TIMEOUT)
    assert got.header is not None
    buffer[100] ^= 4
    with pytest.raises(Corrupt, match="payload_checksum"):
        verify_payload(decode(got.header), buffer)


@pytest.mark.parametrize("url", ["", "redis//x", "s3://bucket", "kvrelay://nowhere", "localhost:1"])
def test_an_impossible_url_is_refused_with_what_would_be_possible(url: str) -> None:
    with pytest.raises(Rejected) as caught:
        connect(url)
    assert caught.value.field == "store"
    assert "kvrelay" in str(caught.value) or "HOST:PORT" in str(caught.value)


@ours_only
def test_a_lookup_says_why_the_first_missing_block_is_not_there(store: Store) -> None:
    there, cleared, never = make(), make(), name_of(make())
    assert why(store, never) is Miss.NEVER_STORED
    put(store, cleared)
    store.clear(TIMEOUT)
    put(store, there)
    assert why(store, name_of(there)) is None
    assert why(store) is None
    assert why(store, name_of(there), name_of(cleared), never) is Miss.CLEARED
    assert why(store, name_of(there), never, name_of(cleared)) is Miss.NEVER_STORED
    tails = [Tail(1, never), Tail(1, name_of(cleared))]
    assert why(store, name_of(there), tails=tails) is Miss.CLEARED, "of two ways the known one"
    assert why(store, name_of(there), tails=[Tail(0, name_of(cleared))]) is None
    put(store, cleared)
    assert why(store, name_of(there), name_of(cleared)) is None


@ours_only
def test_an_evicted_block_is_told_as_such(store: Store) -> None:
    first, size = make(1 << 20), 1 << 20
    put(store, first)
    for _ in range(40):
        if not present(store, first)[0]:
            break
        put(store, make(size))
    assert why(store, name_of(first)) is Miss.EVICTED


@ours_only
def test_the_same_opening_under_another_name_is_of_another_namespace(store: Store) -> None:
    mine, other, later = make(), make(), make()
    alike, strange = 7 ^ FAMILY_MASK, 7 ^ (1 << 63)
    store.put(
        [replace(offer(other), first_block_hash=7), replace(offer(later), name=name_of(later))],
        TIMEOUT,
    )
    assert why(store, name_of(mine), first_block_hashes=[strange, 7]) is Miss.OTHER_NUMERICS
    assert why(store, name_of(mine), first_block_hashes=[strange, alike]) is Miss.OTHER_NAMESPACE
    assert why(store, name_of(mine), first_block_hashes=[strange]) is Miss.NEVER_STORED
    assert why(store, name_of(later), name_of(mine), first_block_hashes=[7]) is Miss.NEVER_STORED
    store.clear(TIMEOUT)
    assert why(store, name_of(mine), first_block_hashes=[7]) is Miss.NEVER_STORED
    assert why(store, name_of(other), first_block_hashes=[7]) is Miss.CLEARED


@ours_only
def test_a_block_on_its_way_is_too_late(store: Store, connecting: Connect) -> None:
    block, other, told = make(1 << 20), connecting(), list[Miss | None]()

    def read() -> Block:
        told.append(why(other, name_of(block)))
        return block

    store.put([Offer(name_of(block), block.size, False, read)], TIMEOUT)
    assert told == [Miss.TOO_LATE]
