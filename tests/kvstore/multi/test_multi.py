"""Several stores in one: what each adds, and that none of them costs the others anything."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import NoReturn

import pytest

from kvrelay.block.header import decode
from kvrelay.block.verify import verify_payload
from kvrelay.errors import DeadlineExceeded, Rejected, Unavailable
from kvstore import (
    Block,
    GetResult,
    Lease,
    LookupResult,
    Offer,
    Outcome,
    PutStatus,
    SurveyResult,
    Tail,
    Want,
    connect,
)
from kvstore.base import NameQuery
from kvstore.client.memory import MemoryStore, forget
from kvstore.limits import BUDGET
from kvstore.multi.backend import StoreBackend
from kvstore.multi.store import MultiStore
from kvstore.multi.write_behind import WriteBehind
from kvstore.urls import public_url, public_urls, split_urls
from tests.kvstore.rig import TIMEOUT, chain, make, name_of, put

_NUMBERS = itertools.count()


class Stage(MemoryStore):
    """A store that can be made to stand still, to fail and to lie."""

    def __init__(self, budget: int = BUDGET) -> None:
        self.name = f"several-{next(_NUMBERS)}"
        super().__init__(self.name, budget)
        self.go = threading.Event()
        self.unavailable = False
        self.fail_after = 1 << 30
        self.go.set()
        self.lies: tuple[int, ...] | None = None
        self.surveys = 0
        self.asked = threading.Semaphore(0)

    def survey(self, query: NameQuery, timeout: float) -> SurveyResult:
        self.surveys += 1
        self._pass()
        if self.lies is not None:
            return SurveyResult(self.lies[: len(query.names)], None)
        return super().survey(query, timeout)

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        self._pass()
        for count, got in enumerate(super().get(wants, timeout)):
            if count >= self.fail_after:
                raise Unavailable("as told")
            if self.lies is None:
                yield got
            else:
                wants[got.index].buffer[:] = bytes(len(wants[got.index].buffer))
                yield GetResult(got.index, make(len(wants[got.index].buffer)).header)

    def put(self, offers: Sequence[Offer], timeout: float) -> list[Outcome]:
        self._pass()
        return super().put(offers, timeout)

    def release(self, leases: Sequence[Lease], timeout: float) -> None:
        self.go.wait(TIMEOUT)
        super().release(leases, timeout)

    def _pass(self) -> None:
        self.asked.release()
        self.go.wait(TIMEOUT)
        if self.unavailable:
            raise Unavailable("as told")


class Rig:
    """Two stages, ``near`` before ``far``, and the store they make."""

    def __init__(self, write: bool = False, promote: bool = False, budget: int = BUDGET) -> None:
        self.near = Stage(budget)
        self.far = Stage()
        self.store = MultiStore(
            [
                StoreBackend("near", self.near),
                StoreBackend("far", self.far, write=write, promote=promote),
            ]
        )

    @property
    def leases(self) -> tuple[int, int]:
        return self.near.stats(1).leases, self.far.stats(1).leases

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not true():
            assert time.monotonic() < deadline
            threading.Event().wait(0.005)

    def flush(self) -> None:
        for backend in self.store.backends:
            assert backend.writer.flush(TIMEOUT)

    def lookup(self, *blocks: Block, ttl: float = 60, timeout: float = TIMEOUT) -> LookupResult:
        return self.store.lookup(NameQuery([name_of(b) for b in blocks], ttl=ttl), timeout)

    def backend(self, name: str) -> StoreBackend:
        return next(backend for backend in self.store.backends if backend.name == name)

    def close(self) -> None:
        for stage in (self.near, self.far):
            stage.go.set()
            forget(stage.name)
        self.store.close()


Making = Callable[..., Rig]


@pytest.fixture
def making() -> Iterator[Making]:
    rigs: list[Rig] = []

    def made(write: bool = False, promote: bool = False, budget: int = BUDGET) -> Rig:
        rigs.append(Rig(write, promote, budget))
        return rigs[-1]

    yield made
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(making: Making) -> Rig:
    return making()


def wants_of(blocks: Sequence[Block], sources: Sequence[str | None]) -> list[Want]:
    return [
        Want(name_of(block), memoryview(bytearray(block.payload.nbytes)), source)
        for block, source in zip(blocks, sources, strict=True)
    ]


def read(
    store: MultiStore, blocks: Sequence[Block], sources: Sequence[str | None]
) -> list[GetResult]:
    """All of them; bytes that come are compared."""
    wants = wants_of(blocks, sources)
    gots = list(store.get(wants, TIMEOUT))
    assert [got.index for got in gots] == list(range(len(blocks)))
    for got, want, block in zip(gots, wants, blocks, strict=True):
        assert got.header is None or (got.header, want.buffer) == (block.header, block.payload)
    return gots


def came(gots: Sequence[GetResult]) -> list[bool]:
    return [got.header is not None for got in gots]


def test_a_lead_goes_on_across_stores(rig: Rig) -> None:
    blocks, tail = [make(100 + i) for i in range(6)], make(50, count=2)
    put(rig.near, blocks[0], blocks[3])
    put(rig.far, *blocks[1:4], tail)
    found = rig.store.lookup(
        NameQuery(
            [name_of(b) for b in blocks], [Tail(3, b"x" * 32), Tail(4, name_of(tail))], ttl=60
        ),
        TIMEOUT,
    )
    assert (found.lead, found.tail) == (4, 1)
    assert found.sources == ("near", "far", "far", "near", "far")
    assert found.sizes == tuple(b.size for b in (*blocks[:4], tail))
    assert rig.leases == (1, 1)
    gots = read(rig.store, [*blocks[:4], tail], found.sources)
    assert [got.source for got in gots] == list(found.sources)
    assert all(came(gots))
    assert found.lease is not None
    rig.store.release([found.lease], TIMEOUT)
    assert rig.leases == (0, 0)
    assert all(came(read(rig.store, blocks[:4], [None] * 4)))  # without a lookup
    assert came(read(rig.store, blocks, [None] * 6)) == [True] * 4 + [False] * 2


def test_what_one_store_has_is_neither_read_nor_held_in_the_other(rig: Rig) -> None:
    blocks = [make() for _ in range(3)]
    put(rig.far, *blocks)
    put(rig.near, *blocks)
    found = rig.lookup(*blocks)
    assert found.sources == ("near",) * 3
    rig.until(lambda: rig.leases == (1, 0))
    read(rig.store, blocks, found.sources)
    assert rig.far.stats(1).counters.served == 0
    assert found.lease is not None
    assert [name for name, _ in found.lease.parts] == ["near"]


@pytest.mark.parametrize("which", ["near", "far"])
def test_a_store_that_is_gone_is_a_store_that_has_nothing(rig: Rig, which: str) -> None:
    blocks = [make() for _ in range(4)]
    put(rig.near, *blocks[:2])
    put(rig.far, *blocks[2:], blocks[0])
    unreachable = rig.near if which == "near" else rig.far
    sources = rig.lookup(*blocks).sources
    assert sources == ("near", "near", "far", "far")
    unreachable.unavailable = True
    there = [source != which for source in sources]
    assert came(read(rig.store, blocks, sources)) == there
    found = rig.lookup(*blocks)
    assert found.sources == (("far",) if which == "near" else ("near", "near"))
    assert put(rig.store, make(), make()) if which == "far" else True
    rig.near.unavailable = rig.far.unavailable = True
    with pytest.raises(Unavailable):
        rig.lookup(*blocks)
    with pytest.raises(Unavailable):
        put(rig.store, make())


def test_a_store_that_fails_in_the_middle_costs_its_own_blocks(rig: Rig) -> None:
    blocks = [make() for _ in range(8)]
    put(rig.near, *blocks[::2])
    put(rig.far, *blocks[1::2])
    sources = rig.lookup(*blocks).sources
    rig.far.fail_after = 2
    expected = [True] * 5 + [False, True, False]
    assert came(read(rig.store, blocks, sources)) == expected
    rig.far.fail_after = 1 << 30
    rig.near.fail_after = 1
    assert came(read(rig.store, blocks, sources)) == [True, True, *([False, True] * 3)]


def test_nobody_waits_for_an_answer_that_can_add_nothing(rig: Rig) -> None:
    blocks = [make() for _ in range(3)]
    put(rig.near, *blocks)
    put(rig.far, *blocks)
    rig.far.go.clear()
    found = rig.lookup(*blocks, timeout=4 * TIMEOUT)  # it would be waited for twice as long
    assert (found.lead, rig.backend("far").late) == (3, False)
    rig.far.go.set()
    rig.until(lambda: rig.far.stats(1).counters.lookups == 1 and rig.leases == (1, 0))


def test_a_store_that_stands_still_is_waited_for_once(rig: Rig) -> None:
    blocks = [make() for _ in range(3)]
    put(rig.near, *blocks[:2])
    put(rig.far, *blocks)
    rig.far.go.clear()
    assert rig.lookup(*blocks, timeout=2.0).lead == 2
    assert rig.backend("far").late
    leases = [rig.lookup(*blocks, timeout=4 * TIMEOUT).lease for _ in range(3)]
    assert rig.leases == (4, 0)
    rig.store.release([lease for lease in leases if lease], TIMEOUT)
    assert rig.leases == (1, 0)
    rig.far.go.set()  # what it holds by now goes back, and it is trusted again
    rig.until(lambda: rig.far.stats(1).counters.lookups >= 3 and rig.leases == (1, 0))

    def again() -> bool:
        found = rig.lookup(*blocks)
        rig.store.release([found.lease] if found.lease else [], TIMEOUT)
        return found.lead == 3

    rig.until(again)
    assert not rig.backend("far").late


def test_a_store_that_lies_is_asked_last(rig: Rig) -> None:
    blocks = [make() for _ in range(3)]
    put(rig.near, *blocks)
    put(rig.far, *blocks)
    rig.near.lies = tuple(b.size for b in blocks)
    assert rig.lookup(*blocks).sources == ("near",) * 3

    def reader(sources: Sequence[str | None]) -> int:
        """How many a careful reader takes before he leaves."""
        taken, wants = 0, wants_of(blocks, sources)
        with closing(rig.store.get(wants, TIMEOUT)) as gots:
            for got in gots:
                header = decode(got.header or b"")
                if header.name != wants[got.index].name:
                    break
                verify_payload(header, wants[got.index].buffer)
                taken += 1
        return taken

    assert reader(("near",) * 3) == 0
    found = rig.lookup(*blocks)
    assert found.sources == ("far",) * 3
    assert reader(found.sources) == 3


def test_a_broken_promise_is_remembered(rig: Rig) -> None:
    block = make()
    put(rig.near, block)
    put(rig.far, block)
    sources = rig.lookup(block, ttl=0).sources
    assert sources == ("near",)
    rig.near.clear(1)
    assert came(read(rig.store, [block], sources)) == [False]
    put(rig.near, block)
    assert rig.lookup(block, ttl=0).sources == ("far",)


def test_an_answer_of_the_wrong_length_is_none(rig: Rig) -> None:
    block = make()
    put(rig.far, block)
    rig.near.lies = ()
    assert rig.lookup(block).sources == ("far",)


def test_what_is_put_goes_to_the_first(rig: Rig) -> None:
    block = make()
    assert put(rig.store, block) == [PutStatus.STORED]
    rig.flush()
    assert (rig.near.stats(1).entries, rig.far.stats(1).entries) == (1, 0)
    rig.near.unavailable = True
    with pytest.raises(Unavailable):
        put(rig.store, make())


def test_what_is_put_goes_to_all_that_want_it_behind_the_caller(making: Making) -> None:
    rig = making(write=True)
    blocks = [make() for _ in range(3)]
    rig.far.go.clear()  # it stands still, and nobody notices
    changing = [memoryview(bytearray(block.payload)) for block in blocks]
    offers = [
        Offer(name_of(b), b.size, False, lambda b=b, m=m: Block(b.header, m))  # type: ignore[misc]
        for b, m in zip(blocks, changing, strict=True)
    ]
    assert {outcome.status for outcome in rig.store.put(offers, TIMEOUT)} == {PutStatus.STORED}
    for memory in changing:  # the pool is used for other blocks now
        memory[:] = bytes(len(memory))
    assert rig.backend("far").writer.counts.waiting == 3
    rig.far.go.set()
    rig.flush()
    assert all(came(read(rig.store, blocks, ["far"] * 3)))
    assert put(rig.store, *blocks) == [PutStatus.EXISTED] * 3
    assert rig.backend("far").writer.counts.stored == 3


@pytest.mark.parametrize("at_once", [2, 3, 12])
def test_what_the_first_has_no_room_for_goes_to_the_others(making: Making, at_once: int) -> None:
    """A prompt of 12 blocks, and a first store of six: the second store has all of it."""
    rig = making(write=True, budget=6 * 4096)
    offers = chain(12, 4096)
    blocks = [offer.read() for offer in offers]
    kept: list[PutStatus] = []
    for start in range(0, len(offers), at_once):
        kept += statuses(rig.store.put(offers[start : start + at_once], TIMEOUT))
    assert {PutStatus.NO_ROOM, PutStatus.NO_PARENT} & set(kept)
    rig.flush()
    assert rig.far.lookup(NameQuery([one.name for one in offers]), TIMEOUT).lead == 12
    assert all(came(read(rig.store, blocks, ["far"] * 12)))
    assert rig.backend("far").writer.counts.stored == 12
    again = chain(12, 4096)
    rig.backend("far").writer = WriteBehind("far", rig.far, limit=0)
    refused = sum(not outcome.present for outcome in rig.store.put(again, TIMEOUT))
    assert rig.backend("far").writer.counts.dropped == 12
    assert refused


def test_the_next_store_is_written_when_the_first_is_gone(making: Making) -> None:
    rig = making(write=True)
    rig.near.unavailable = True
    block = make()
    assert put(rig.store, block) == [PutStatus.STORED]
    assert rig.lookup(block).sources == ("far",)


def statuses(outcomes: Sequence[Outcome]) -> list[PutStatus]:
    return [outcome.status for outcome in outcomes]


def test_what_continues_a_block_of_another_store_is_put(rig: Rig) -> None:
    offers = chain(6, 4096)
    rig.far.put(offers[:3], TIMEOUT)
    assert statuses(rig.store.put(offers[3:], TIMEOUT)) == [PutStatus.STORED] * 3
    found = rig.store.lookup(NameQuery([one.name for one in offers]), TIMEOUT)
    assert (found.lead, found.sources) == (6, ("far",) * 3 + ("near",) * 3)


@pytest.mark.parametrize("write", [False, True])
def test_what_continues_a_lost_block_is_put_if_another_store_may_have_it(
    making: Making, write: bool
) -> None:
    rig = making(write=write)
    offers = chain(9, 4096)
    rig.store.put(offers[:3], TIMEOUT)
    rig.flush()
    rig.near.clear(1)
    kept = statuses(rig.store.put(offers[3:6], TIMEOUT) + rig.store.put(offers[6:], TIMEOUT))
    assert kept == [PutStatus.STORED if write else PutStatus.NO_PARENT] * 6
    rig.flush()
    rig.near.clear(1)
    assert rig.store.lookup(NameQuery([one.name for one in offers]), TIMEOUT).lead == 9 * write
    again = statuses(rig.store.put(offers, TIMEOUT))
    assert again == [PutStatus.STORED] * 9


def test_what_does_not_fit_is_dropped_and_counted(making: Making) -> None:
    rig = making(write=True)
    backend = rig.backend("far")
    backend.writer = WriteBehind("far", rig.far, limit=10_000)
    rig.far.go.clear()
    blocks = [make(4000) for _ in range(5)]
    assert set(put(rig.store, *blocks)) == {PutStatus.STORED}
    assert (backend.writer.counts.waiting, backend.writer.counts.dropped) == (2, 3)
    rig.far.go.set()
    assert backend.writer.flush(TIMEOUT)
    put(rig.store, make(4000))
    assert backend.writer.flush(TIMEOUT)
    assert backend.writer.counts.stored == 3
    rig.far.unavailable = True
    put(rig.store, make(4000))
    assert backend.writer.flush(TIMEOUT)
    assert backend.writer.counts.failed == 1


def test_what_is_read_from_a_later_store_is_promoted_once_it_was_accepted(making: Making) -> None:
    rig = making(promote=True)
    blocks = [make() for _ in range(4)]
    put(rig.far, *blocks)
    wants = wants_of(blocks, ["far"] * 4)
    with closing(rig.store.get(wants, TIMEOUT)) as gots:
        assert came([next(gots), next(gots), next(gots)]) == [True] * 3  # leaves at the third
    for want in wants:
        want.buffer[:] = bytes(len(want.buffer))
    rig.flush()
    found = rig.lookup(*blocks)
    assert found.sources == ("near", "near", "far", "far")
    assert all(came(read(rig.store, blocks, found.sources)))


def test_without_promotion_nothing_is_written_by_readers(rig: Rig) -> None:
    block = make()
    put(rig.far, block)
    read(rig.store, [block], rig.lookup(block).sources)
    rig.flush()
    assert rig.near.stats(1).entries == 0


def test_nobody_writes_into_a_buffer_after_its_reader_has_left(rig: Rig) -> None:
    blocks = [make(300_000) for _ in range(40)]
    put(rig.near, *blocks[:1])
    put(rig.far, *blocks[1:])
    for _ in range(20):
        wants = wants_of(blocks, ["near", *["far"] * 39])
        with closing(rig.store.get(wants, TIMEOUT)) as gots:
            next(gots)
        before = [bytes(want.buffer[-8:]) for want in wants]
        threading.Event().wait(0.002)
        assert [bytes(want.buffer[-8:]) for want in wants] == before
    assert not [t for t in threading.enumerate() if t.name.startswith("fetch")]


def test_figures_of_each_and_of_all(rig: Rig) -> None:
    put(rig.near, make(), make())
    put(rig.far, make())
    assert rig.store.stats(1).entries == 3
    rig.far.lookup(NameQuery([]), 1)
    one, two = rig.store.each(TIMEOUT)
    assert (one[0], two[0]) == ("near", "far")
    assert [s.entries for s in (one[1], two[1]) if not isinstance(s, Exception)] == [2, 1]
    rig.near.stats = _raising  # type: ignore[method-assign]
    assert isinstance(rig.store.each(TIMEOUT)[0][1], Unavailable)
    assert rig.store.stats(TIMEOUT).entries == 1
    assert rig.store.clear(TIMEOUT) == 3
    rig.near.clear = _raising  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        rig.store.clear(TIMEOUT)


def _raising(timeout: float) -> NoReturn:
    raise Unavailable("as told")


def test_a_closed_store_is_unavailable_and_leaves_no_thread() -> None:
    before = threading.active_count()
    rig = Rig(write=True)
    put(rig.store, make())
    rig.lookup(make())
    rig.close()
    with pytest.raises(Unavailable):
        rig.lookup(make())
    rig.until(lambda: threading.active_count() <= before)


def test_calls_of_a_store_that_stands_still_are_bounded(rig: Rig) -> None:
    block = make()
    put(rig.near, block)
    rig.far.go.clear()
    assert rig.lookup(block, make(), ttl=0, timeout=2.0).lead == 1
    for _ in range(200):
        assert rig.lookup(block, make(), ttl=0).lead == 1
    assert rig.far.surveys <= 4
    assert threading.active_count() < 40


def test_many_readers_and_failing_stores_lose_nothing(making: Making) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rig = making(write=True, promote=True)
    blocks = [make(2000) for _ in range(40)]
    right: list[int] = []

    def request(chance: random.Random) -> int:
        """Put, look up and read while stores come and go; how many blocks came."""
        stage = chance.choice([rig.near, rig.far])
        stage.unavailable = chance.random() < 0.3
        stage.fail_after = chance.choice([1, 1 << 30])
        chosen = blocks[(start := chance.randrange(36)) : start + 4]
        lease = None
        try:
            put(rig.store, chance.choice(blocks))
            found = rig.lookup(*chosen)
            lease = found.lease
            return sum(came(read(rig.store, chosen[: found.lead], found.sources)))
        except (Unavailable, DeadlineExceeded):
            return 0
        finally:
            rig.store.release([lease] if lease else [], TIMEOUT)

    def worker(number: int) -> None:
        chance = random.Random(seed + number)
        right.append(sum(request(chance) for _ in range(60)))

    threads = [threading.Thread(target=worker, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(right) == 4
    assert sum(right) > 0
    rig.flush()
    rig.until(lambda: rig.leases == (0, 0))
    for stage in (rig.near, rig.far):
        assert stage.stats(1).reservations == stage.stats(1).counters.corrupt == 0


def test_lists_of_urls() -> None:
    listed = "kvrelay://a:1?transport=shm, redis+cluster://h:1,h:2 ,memory://x"
    assert split_urls(listed) == [
        "kvrelay://a:1?transport=shm",
        "redis+cluster://h:1,h:2",
        "memory://x",
    ]
    assert split_urls("memory://x") == ["memory://x"]
    assert public_url("redis://me:secret@h:1/2?ssl=no") == "redis://h:1/2"
    assert public_url("redis://h?life=9&db=2&prefix=x&ca=me") == "redis://h?db=2&prefix=x"
    assert public_urls("redis://:secret@h:1,memory://x?a=b") == "redis://h:1,memory://x"
    assert public_urls("") == ""
    assert public_url("127.0.0.1:1") == "127.0.0.1:1"
    assert public_url("me:secret@h:1") == "h:1"
    store = connect("memory://a,memory://b?write=yes,memory://c?promote=yes&write=no")
    assert isinstance(store, MultiStore)
    assert [(backend.name, backend.write, backend.promote) for backend in store.backends] == [
        ("memory://a", False, False),
        ("memory://b", True, False),
        ("memory://c", False, True),
    ]
    assert store.url == "memory://a,memory://b,memory://c"
    store.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("memory://a?write=yes,memory://b", "the first store has no write="),
        ("memory://a,memory://b?write=perhaps", "neither yes nor no"),
        ("memory://a,memory://b?fast=yes", "is not a parameter"),
        ("memory://a,memory://b,memory://a", "twice"),
        ("memory://a,s3://b", "none of the schemes"),
        ("memory://a?write=yes", "is not a parameter"),
    ],
)
def test_an_impossible_list_is_refused(text: str, said: str) -> None:
    with pytest.raises(Rejected, match=said) as caught:
        connect(text)
    assert caught.value.field == "store"
