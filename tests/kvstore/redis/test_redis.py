"""What holds of Redis and Redis Cluster beside ``test_conformance.py``, and what instead of it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvrelay.errors import Corrupt, DeadlineExceeded, Rejected, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.usage import Miss
from kvstore import Block, Offer, PutStatus, Tail, Want, connect
from kvstore.base import NameQuery
from kvstore.client.memory import MemoryStore, forget
from kvstore.multi.backend import StoreBackend
from kvstore.multi.store import MultiStore
from kvstore.redis import RedisStore, settings_of, topology
from kvstore.redis.call import CHUNK
from kvstore.redis.connection import RedisConnection
from kvstore.redis.reads import WINDOW, ReadPipeline
from kvstore.redis.server import RedisServer
from kvstore.urls import public_url
from tests.kvstore.redis.redisserver import Cluster, Server, running, version
from tests.kvstore.redis.spoil import WRONG, Spoil, flipped
from tests.kvstore.rig import (
    TIMEOUT,
    PausedClock,
    get,
    make,
    name_of,
    offer,
    open_store,
    present,
    put,
)

Make = Callable[..., RedisStore]
LIFE, PARTIAL = 5000.0, 300.0
_PREFIXES = itertools.count()


@pytest.fixture
def making(redis_server: Server) -> Iterator[Make]:
    """Stores of the session's server with a prefix of the test's own, emptied before it."""
    stores: list[RedisStore] = []
    prefix = f"test{next(_PREFIXES)}"

    def one(prefix: str = prefix) -> RedisStore:
        url = f"redis://{redis_server.address}?prefix={prefix}&life={LIFE}&partial_life={PARTIAL}"
        stores.append(open_store(url))
        return stores[-1]

    with redis_server.client() as client:
        client.flushall()
    yield one
    for store in stores:
        store.close()


@pytest.fixture
def clustered(redis_cluster: Cluster) -> Iterator[RedisStore]:
    redis_cluster.flush()
    store = open_store(f"redis+cluster://{redis_cluster.servers[0].address}")
    yield store
    store.close()


def key_of(store: RedisStore, block: Block) -> bytes:
    return store._topology.key(name_of(block))


def test_a_server_runs_and_says_which() -> None:
    """Without one the suite fails before this; see ``redisserver.binary``."""
    print(version())
    assert "v=" in version()


# What a lease is


def test_what_a_lookup_finds_lives_on_and_what_it_does_not_hold_is_left_alone(
    making: Make, redis_server: Server
) -> None:
    store, full, tail = making(), make(), make(count=1)
    store.put([offer(full), Offer(name_of(tail), tail.size, True, lambda: tail)], TIMEOUT)
    with redis_server.client() as client:
        lives = [client.pttl(key_of(store, block)) for block in (full, tail)]
        assert 0 < lives[1] <= 1000 * PARTIAL < lives[0] <= 1000 * LIFE
        for block in (full, tail):
            client.pexpire(key_of(store, block), 60_000)
        tails = [Tail(1, name_of(tail))]
        assert store.lookup(NameQuery([name_of(full)], tails), TIMEOUT).lease is None
        assert client.pttl(key_of(store, full)) <= 60_000
        before = time.monotonic()
        found = store.lookup(NameQuery([name_of(full)], tails, ttl=30.0), TIMEOUT)
        assert (found.lead, found.tail, found.missing) == (1, 0, None)
        assert found.lease is not None
        assert before + 30.0 <= found.lease.deadline <= time.monotonic() + 30.0
        assert client.pttl(key_of(store, full)) > 1000 * PARTIAL
        assert 60_000 < client.pttl(key_of(store, tail)) <= 1000 * PARTIAL
        client.pexpire(key_of(store, full), 60_000)
        assert put(store, full) == [PutStatus.EXISTED]
        assert client.pttl(key_of(store, full)) > 1000 * PARTIAL


def test_a_lease_is_no_longer_than_a_block_lives(making: Make) -> None:
    store, tail = making(), make(count=1)
    store.put([Offer(name_of(tail), tail.size, True, lambda: tail)], TIMEOUT)
    lease = store.lookup(NameQuery([], [Tail(0, name_of(tail))], ttl=10 * PARTIAL), TIMEOUT).lease
    assert lease is not None
    assert lease.deadline <= time.monotonic() + PARTIAL
    store.release([lease], TIMEOUT)
    assert present(store, tail) == [True]


def test_what_expired_or_was_removed_is_absent_and_nobody_knows_why(
    making: Make, redis_server: Server
) -> None:
    store, expired, removed, there = making(), make(), make(), make()
    put(store, expired, removed, there)
    with redis_server.client() as client:
        client.pexpire(key_of(store, expired), 1)
        client.unlink(key_of(store, removed))
        while client.exists(key_of(store, expired)):
            time.sleep(0.01)
    gots = get(store, expired, removed, there)
    assert [got.header is not None for got in gots] == [False, False, True]
    found = store.lookup(NameQuery([name_of(there), name_of(expired)], ttl=1.0), TIMEOUT)
    assert (found.lead, found.missing) == (1, Miss.UNKNOWN)


def test_a_server_that_is_full_evicts_or_has_no_room(tmp_path: Path) -> None:
    server = Server(tmp_path, ["--maxmemory", "16mb"])
    with running(server), contextlib.closing(open_store(f"redis://{server.address}")) as store:
        blocks = [make(1 << 20) for _ in range(30)]
        assert {kept for block in blocks for kept in put(store, block)} == {PutStatus.STORED}
        there = present(store, *blocks)
        assert 0 < there.count(True) < 16
        stats = store.stats(TIMEOUT)
        assert stats.budget == 16 << 20
        assert stats.counters.evicted >= 30 - stats.entries > 0
        with server.client() as client:
            client.config_set("maxmemory-policy", "noeviction")
        store.clear(TIMEOUT)
        while store.stats(TIMEOUT).bytes > 8 << 20:  # UNLINK frees in the background
            time.sleep(0.01)
        more = [make(1 << 20) for _ in range(20)]
        kept = put(store, *more)
        assert set(kept) == {PutStatus.STORED, PutStatus.NO_ROOM}
        assert [k is PutStatus.STORED for k in kept] == present(store, *more)


# Writers and readers at once


def test_of_concurrent_puts_of_one_name_one_is_kept(making: Make) -> None:
    stores = [making() for _ in range(4)]
    blocks = [make(300_000) for _ in range(10)]
    results: list[list[PutStatus]] = []
    threads = [threading.Thread(target=lambda s=s: results.append(put(s, *blocks))) for s in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for of_one_name in zip(*results, strict=True):
        assert sorted(kept.value for kept in of_one_name) == ["existed"] * 3 + ["stored"]
    assert all(got.header is not None for got in get(stores[0], *blocks))


def test_a_block_is_seen_whole_or_not_at_all(making: Make) -> None:
    writer, reader = making(), making()
    block = make(5 << 20)
    reading, go_on = threading.Event(), threading.Event()
    results: list[PutStatus] = []

    def slow() -> Block:
        reading.set()
        go_on.wait(TIMEOUT)
        return block

    wanted = Offer(name_of(block), block.size, False, slow)
    thread = threading.Thread(
        target=lambda: results.extend(o.status for o in writer.put([wanted], 2 * TIMEOUT))
    )
    thread.start()
    assert reading.wait(TIMEOUT)
    assert present(reader, block) == [False]
    assert get(reader, block)[0].header is None
    assert put(reader, block) == [PutStatus.STORED]
    go_on.set()
    thread.join()
    assert results == [PutStatus.EXISTED]


# What is in flight, and how often somebody is asked


class Sink:
    """A link that counts what it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def send(self, commands: bytes) -> None:
        self.asked += commands.count(b"GET\r\n")


@pytest.mark.parametrize("size", [1, 1 << 10, 1 << 20, 4 << 20, 20 << 20])
def test_only_so_much_is_asked_for_at_once(size: int) -> None:
    sink = Sink()
    pipeline = ReadPipeline(RedisServer.__new__(RedisServer), sink)  # type: ignore[arg-type]
    for number in range(3000):
        pipeline.add(b"%d" % number, size)
    pipeline.fill()
    assert sink.asked == max(1, min(512, WINDOW // size))
    pipeline.fill()
    assert sink.asked == max(1, min(512, WINDOW // size)), "nothing was answered since"


def test_a_lookup_is_one_round_trip_to_each_server(
    clustered: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [make(10) for _ in range(300)]
    put(clustered, *blocks)
    asked: list[RedisConnection] = []
    whole = RedisConnection.send

    def counted(connection: RedisConnection, commands: bytes) -> None:
        asked.append(connection)
        whole(connection, commands)

    monkeypatch.setattr(RedisConnection, "send", counted)
    names = [name_of(block) for block in blocks]
    assert clustered.lookup(NameQuery(names, ttl=30.0), TIMEOUT).lead == 300
    assert len(asked) == len(set(asked)) == 3


def test_many_names_are_asked_for_in_pieces(making: Make) -> None:
    store, block = making(), make()
    put(store, block)
    names = [name_of(block)] * (2 * CHUNK + 3)
    assert store.lookup(NameQuery(names, ttl=30.0), TIMEOUT).lead == len(names)


def test_no_command_is_used_that_the_documentation_does_not_name(tmp_path: Path) -> None:
    """No scripts, and nothing else that a careful administrator would not allow."""
    server, page = Server(tmp_path), Path("kvstore/README.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if "ACL SETUSER" in line]
    allowed = {word.lstrip("+").lower() for word in line.split() if word.startswith("+")}
    with running(server):
        store, block = open_store(f"redis://{server.address}/2"), make()
        with server.client() as client:
            client.config_resetstat()
            put(store, block, make(1 << 20))
            get(store, block)
            store.lookup(NameQuery([name_of(block)], ttl=30.0), TIMEOUT)
            store.stats(TIMEOUT)
            store.clear(TIMEOUT)
            store.close()
            used = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    assert {"get", "set", "strlen", "pexpire", "unlink"} <= used
    assert used - {"config|resetstat", "config"} <= allowed


# Keys


def test_a_call_without_time_says_nothing_of_the_server(making: Make) -> None:
    store, block = making(), make()
    for _ in range(3):
        with pytest.raises(DeadlineExceeded):
            store.put([offer(block)], 0.0)
        with pytest.raises(DeadlineExceeded):
            store.lookup(NameQuery([name_of(block)]), 0.0)
    assert put(store, block) == [PutStatus.STORED]


def test_prefixes_keep_stores_apart_and_clear_takes_its_own(
    making: Make, redis_server: Server
) -> None:
    one, other, block = making("one"), making("one:two"), make()
    assert put(one, block) == [PutStatus.STORED]
    assert present(other, block) == [False]
    assert put(other, block, make()) == [PutStatus.STORED] * 2
    with redis_server.client() as client:
        client.set("somebody's", "value")
        assert other.clear(TIMEOUT) == 2
        assert client.exists("somebody's") == 1
    assert present(one, block) == [True]


def test_clear_takes_blocks_and_nobody_elses_keys(making: Make, redis_server: Server) -> None:
    one, other, block = making("one"), making("one:two"), make()
    put(one, block)
    put(other, block)
    digits = name_of(block).hex()
    theirs = {"one", "one:session:42", f"one:{digits.upper()}", f"one:{digits}0", f"x:one:{digits}"}
    with redis_server.client() as client:
        for key in theirs:
            client.set(key, "value")
        client.hset("one:users", "me", "you")
        assert one.clear(TIMEOUT) == 1
        assert client.exists(*theirs, "one:users") == len(theirs) + 1
    assert (present(one, block), present(other, block)) == ([False], [True])


@pytest.mark.parametrize("spoil", WRONG, ids=lambda spoil: spoil.__name__)
def test_what_is_wrong_goes_when_its_reader_leaves_and_can_be_put_anew(
    making: Make, redis_server: Server, spoil: Spoil
) -> None:
    """Lookups prolong it and puts create only: else it would stand there for good."""
    store, before, block, after = making(), make(), make(), make()
    blocks = [before, block, after]
    put(store, *blocks)
    with redis_server.client() as client:
        spoil(client.get(key_of(store, block)) or b"", client, key_of(store, block))
    wants = [Want(name_of(b), memoryview(bytearray(b.payload.nbytes))) for b in blocks]
    with contextlib.closing(store.get(wants, TIMEOUT)) as arriving:
        assert next(arriving).header == before.header
        next(arriving)  # it is wrong, and the reader goes no further
    assert store.stats(TIMEOUT).counters.corrupt == 1
    assert put(store, *blocks) == [PutStatus.EXISTED, PutStatus.STORED, PutStatus.EXISTED]
    assert all(got.header is not None for got in get(store, *blocks))


@pytest.mark.parametrize("spoil", WRONG, ids=lambda spoil: spoil.__name__)
def test_what_is_wrong_is_found_by_a_lookup_so_that_its_reader_removes_it(
    making: Make, redis_server: Server, spoil: Spoil
) -> None:
    """A worker gets only what a lookup has found, and puts what a lookup has not."""
    store, blocks = making(), [make() for _ in range(3)]
    put(store, *blocks)
    with redis_server.client() as client:
        key = key_of(store, blocks[1])
        spoil(client.get(key) or b"", client, key)
    query = NameQuery([name_of(block) for block in blocks], ttl=LIFE)
    for expected in (1, 3):
        found = store.lookup(query, TIMEOUT).lead
        read = 0
        wants = [Want(name_of(b), memoryview(bytearray(b.payload.nbytes))) for b in blocks[:found]]
        with contextlib.closing(store.get(wants, TIMEOUT)) as arriving:
            for got, block in zip(arriving, blocks, strict=False):
                if got.header != block.header or wants[got.index].buffer != block.payload:
                    break
                read += 1
        assert read == expected
        put(store, *blocks[read:])


def test_what_is_wrong_in_a_store_behind_another_goes_too(
    making: Make, redis_server: Server
) -> None:
    """It is read ahead there: when its reader leaves, its store has long been done."""
    near, far = MemoryStore("before-redis"), making()
    block, wrong, after = make(), make(), make()
    put(near, block)
    put(far, wrong, after)
    with redis_server.client() as client:
        flipped(client.get(key_of(far, wrong)) or b"", client, key_of(far, wrong))
    blocks = {"near": [block], "far": [wrong, after]}
    wants = [
        Want(name_of(b), memoryview(bytearray(b.payload.nbytes)), source)
        for source, some in blocks.items()
        for b in some
    ]
    with contextlib.closing(
        MultiStore([StoreBackend("near", near), StoreBackend("far", far)])
    ) as both:
        with contextlib.closing(both.get(wants, TIMEOUT)) as arriving:
            next(arriving)
            next(arriving)
        deadline = time.monotonic() + TIMEOUT
        while present(far, wrong) != [False]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert present(far, after) == [True]
    forget("before-redis")


def test_a_block_that_is_right_stays_when_its_reader_leaves(making: Make) -> None:
    store, block = making(), make()
    put(store, block)
    for wanted in (block.payload.nbytes, 7):
        want = Want(name_of(block), memoryview(bytearray(wanted)))
        with contextlib.closing(store.get([want], TIMEOUT)) as arriving:
            next(arriving)
    assert present(store, block) == [True]
    assert store.stats(TIMEOUT).counters.corrupt == 0


def test_a_value_that_is_no_block_does_not_come_as_one(making: Make, redis_server: Server) -> None:
    store, junk, short, listed, block = making(), make(), make(), make(), make()
    put(store, block)
    with redis_server.client() as client:
        client.set(key_of(store, junk), os.urandom(junk.size - 500))
        client.set(key_of(store, short), b"x")
        client.rpush(key_of(store, listed), "x")
    wants = [Want(name_of(b), memoryview(bytearray(4096))) for b in (junk, short, listed, block)]
    gots = list(store.get(wants, TIMEOUT))
    assert [got.header for got in gots] == [b"", b"", b"", block.header]
    assert wants[3].buffer == block.payload
    assert present(store, short, listed, block) == [True] * 3  # a reader removes what is wrong


# Servers that go and come


def test_a_server_that_was_started_anew_is_empty_and_no_error(tmp_path: Path) -> None:
    server = Server(tmp_path)
    with running(server), contextlib.closing(open_store(f"redis://{server.address}")) as store:
        block = make(1 << 20)
        put(store, block)
        get(store, block)
        server.kill()
        server.start()
        assert get(store, block)[0].header is None
        assert put(store, block) == [PutStatus.STORED]
        server.kill()
        server.start()
        assert put(store, block) == [PutStatus.STORED]
        server.kill()
        server.start()
        assert present(store, block) == [False]


def test_a_dead_server_is_unavailable_and_then_not_asked_for_a_while(
    tmp_path: Path, breaker_clock: PausedClock
) -> None:
    server = Server(tmp_path)
    with running(server), contextlib.closing(open_store(f"redis://{server.address}")) as store:
        block = make()
        put(store, block)
        server.kill()
        calls: Sequence[Callable[[], object]] = (
            lambda: present(store, block),
            lambda: get(store, block),
            lambda: put(store, block),
            lambda: store.stats(TIMEOUT),
            lambda: store.clear(TIMEOUT),
        )
        for call in calls:
            with pytest.raises(Unavailable):
                call()
        with pytest.raises(Unavailable, match="next try"):
            present(store, block)
        breaker_clock.go_on()
        server.start()
        until = time.monotonic() + 30.0
        while time.monotonic() < until:
            with contextlib.suppress(Unavailable):
                assert put(store, block) == [PutStatus.STORED]
                return
            time.sleep(0.02)
        raise AssertionError("the server was not found again")


def test_a_closed_store_is_unavailable(making: Make) -> None:
    store = making()
    put(store, make())
    store.close()
    with pytest.raises(Unavailable):
        put(store, make())


# A cluster


def test_blocks_are_spread_over_the_servers(clustered: RedisStore, redis_cluster: Cluster) -> None:
    blocks = [make(2000) for _ in range(90)]
    assert set(put(clustered, *blocks)) == {PutStatus.STORED}
    counts = []
    for server in redis_cluster.servers:
        with server.client() as client:
            counts.append(client.dbsize())
    assert sum(counts) == 90
    assert min(counts) > 5
    assert clustered.stats(TIMEOUT).entries == 90
    assert all(got.header is not None for got in get(clustered, *blocks))
    assert clustered.clear(TIMEOUT) == 90


def test_a_clear_that_could_not_clear_all_says_so(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with (
        running(cluster),
        contextlib.closing(open_store(f"redis+cluster://{cluster.addresses}")) as store,
    ):
        put(store, *(make(2000) for _ in range(60)))
        cluster.servers[1].kill()
        with pytest.raises(Unavailable, match=f"not all: .*{cluster.servers[1].address}") as caught:
            store.clear(TIMEOUT)
        assert 1 < int(str(caught.value).split()[0]) < 60
        assert store.stats(TIMEOUT).entries == 0


@pytest.mark.parametrize("last", [1 << 50, -1, 16384])
def test_slots_that_cannot_be_are_refused_before_there_is_room_for_them(
    last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        def execute_command(self, _: str) -> object:
            return [[0, last, [b"h", 1]]]

    monkeypatch.setattr(topology, "library_client", lambda *_: contextlib.nullcontext(Library()))
    settings = settings_of(urlsplit("redis+cluster://h"), {})
    with pytest.raises(Corrupt, match="slots"):
        topology.slots(settings.addresses[0], settings, Deadline.after(TIMEOUT))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are asked for at every surprise."""
    monkeypatch.setattr(topology, "REFRESH_SECONDS", 0.0)


@pytest.mark.usefixtures("hasty")
def test_a_slot_that_moved_is_followed(clustered: RedisStore, redis_cluster: Cluster) -> None:
    block, others = make(70_000), [make(70_000) for _ in range(5)]
    put(clustered, block)
    clustered.clear(TIMEOUT)
    with move(redis_cluster, clustered, block):
        assert put(clustered, *others, block) == [PutStatus.STORED] * 6
        fresh = open_store(clustered.url)
        assert present(fresh, block, *others) == [True] * 6
        fresh.close()
    assert present(clustered, block) == [False], "it stayed where the slot was"
    assert put(clustered, block) == [PutStatus.STORED]
    got = get(clustered, *others, block)
    assert all(one.header is not None for one in got)


@pytest.mark.usefixtures("hasty")
def test_a_reader_follows_a_slot_too(clustered: RedisStore, redis_cluster: Cluster) -> None:
    block, others = make(70_000), [make(70_000) for _ in range(5)]
    put(clustered, *others)
    with move(redis_cluster, clustered, block):
        fresh = open_store(clustered.url)
        assert put(fresh, block) == [PutStatus.STORED]
        fresh.close()
        gots = get(clustered, *others[:3], block, *others[3:])
        assert all(got.header is not None for got in gots)


def test_a_slot_on_its_way_is_a_miss(clustered: RedisStore, redis_cluster: Cluster) -> None:
    block, other = make(), make()
    put(clustered, other)
    server, target, slot = whose(redis_cluster, clustered, block)
    with server.client() as one, target.client() as two:
        ids = [client.execute_command("CLUSTER MYID").decode() for client in (one, two)]
        one.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
        try:
            found = clustered.lookup(NameQuery([name_of(other), name_of(block)], ttl=1.0), TIMEOUT)
            assert (found.lead, found.missing) == (1, Miss.UNKNOWN), "a lookup needs no redirection"
            gots = get(clustered, block, other)
            assert gots[0].header is None
            assert put(clustered, make(), block)[1] is PutStatus.NO_ROOM
        finally:
            one.execute_command("CLUSTER SETSLOT", slot, "STABLE")


def whose(cluster: Cluster, store: RedisStore, block: Block) -> tuple[Server, Server, int]:
    """The server of a block's slot, another one, and the slot."""
    key = key_of(store, block).decode()
    with cluster.servers[0].client() as client:
        slot = int(client.execute_command("CLUSTER KEYSLOT", key))
    number = next(n for n in range(3) if slot < 16384 * (n + 1) // 3)
    return cluster.servers[number], cluster.servers[(number + 1) % 3], slot


@contextlib.contextmanager
def move(cluster: Cluster, store: RedisStore, block: Block) -> Iterator[None]:
    """For this time the slot of ``block`` belongs to another server."""
    server, target, slot = whose(cluster, store, block)

    def give(to: Server, first: Sequence[Server]) -> None:
        """Tell the new owner first. A server keeps a slot while it has keys there: delete them.

        The new owner gets the newest epoch, so no late message of the old owner takes the slot.
        """
        with to.client() as client:
            client.execute_command("CLUSTER BUMPEPOCH")
            identity = client.execute_command("CLUSTER MYID").decode()
        for one in (*first, *cluster.servers):
            with one.client() as client:
                for key in client.execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
                    client.delete(key)
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", identity)

    give(target, (target,))
    try:
        yield
    finally:
        give(server, (server, target))


# URLs and secrets


@pytest.mark.parametrize(
    ("url", "field"),
    [
        ("redis://a:1,b:2", "host"),
        ("redis://:6379", "host"),
        ("redis://a:x", "host"),
        ("redis://a/one", "db"),
        ("redis+cluster://a:1/1", "db"),
        ("redis://a?prefix={x}", "prefix"),
        ("redis://a?prefix=*", "prefix"),
        ("redis+cluster://a:1?prefix=x:1", "prefix"),  # where the second places of x are
        ("redis://a?life=0", "life"),
        ("redis://a?partial_life=nan", "partial_life"),
        ("redis://a?ca=/nowhere", "ca"),
        ("rediss://a?ca=/nowhere", "ca"),
        ("rediss://a?ca=pyproject.toml", "ca"),
        ("redis://a?password_file=/nowhere", "password_file"),
        ("redis://a?password=x", "password"),
        ("unix://relative", "path"),
    ],
)
def test_a_wrong_url_is_refused_by_field_and_shows_no_secret(url: str, field: str) -> None:
    secret = url.replace("://", "://me:hush@", 1)
    with pytest.raises(Rejected) as caught:
        connect(secret)
    assert caught.value.field == "store"
    assert f": {field}: " in str(caught.value)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("redis://h", ["h:6379"]),
        ("redis://[::1]:7", ["[::1]:7"]),
        ("redis://[::1]", ["[::1]:6379"]),
        ("redis+cluster://a,b:2", ["a:6379", "b:2"]),
        ("unix:///tmp/r.sock?db=3", ["unix:/tmp/r.sock"]),
    ],
)
def test_urls_are_read(url: str, hosts: list[str]) -> None:
    query = dict([pair.split("=") for pair in urlsplit(url).query.split("&") if pair])
    settings = settings_of(urlsplit(url), query, {})
    assert [str(address) for address in settings.addresses] == hosts
    assert settings.db == (3 if "db=3" in url else 0)
    connect(url).close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hush/hush@h",
        "redis://:p@ss/hush:rd@h",
        "redis://:p@ss/1?hush=1@h",
        "redis://:p@ss?hush@h",
        "redis://:p@ss#hush@h",
        "redis://:hush\u2100@h",
        "redis+cluster://:hush?@h",
        "redis://:hush[x@h",
    ],
)
@pytest.mark.parametrize("form", ["{}", "memory://,{}"])
def test_a_password_that_is_not_escaped_is_told_and_not_shown(url: str, form: str) -> None:
    with pytest.raises(Rejected) as caught:
        connect(form.format(url))
    assert caught.value.field == "store"
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://h?prefix=", "prefix: has no value"),
        ("redis://h?bogus", "bogus: has no value"),
        ("redis://h?life=5&life=6", "life: is given twice"),
        ("redis://h/2?db=3", "db: '3' and, in the path, '2'"),
        ("redis://h#x", "has a #"),
    ],
)
def test_nothing_in_a_url_is_passed_over(url: str, words: str) -> None:
    with pytest.raises(Rejected, match=words):
        connect(url)


def test_secrets_come_from_url_file_and_environment_and_go_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    file.write_text("hush from file\nnot this\n")
    monkeypatch.setenv("KVRELAY_REDIS_USERNAME", "me")
    monkeypatch.setenv("KVRELAY_REDIS_PASSWORD", "hush from environment")
    monkeypatch.setenv("KVRELAY_CONFIG", str(tmp_path / "of another program"))
    cases = {
        "redis://h": ("me", "hush from environment"),
        "redis://you:hush%20of%20url@h": ("you", "hush of url"),
        f"redis://h?password_file={file}": ("me", "hush from file"),
        f"redis://you@h?password_file={file}": ("you", "hush from file"),
    }
    for url, expected in cases.items():
        query = dict([pair.split("=") for pair in urlsplit(url).query.split("&") if pair])
        settings = settings_of(urlsplit(url), query)
        assert (settings.username, settings.password) == expected
        for shown in (repr(settings), settings.url, connect(url).url, public_url(url)):
            assert "hush" not in shown
    for url in ("redis://me:hu/sh@h", "redis://me:hu?sh@h", "redis://me:hush@h:x", "x://u:hush@h"):
        assert "hu" not in public_url(url)


def test_a_user_with_few_rights_is_enough(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The rights that the documentation names; one without them is told so and no secret."""
    page = Path("kvstore/README.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if "ACL SETUSER" in line]
    rights = line.split(">SECRET ")[1].split()
    server = Server(tmp_path)
    with running(server), caplog.at_level(logging.DEBUG):
        with server.client() as client:
            client.execute_command("ACL SETUSER", "kv", "on", ">hush", *rights)
            client.execute_command(
                "ACL SETUSER", "reader", "on", ">hush", *rights, "-set", "-config"
            )
            client.execute_command("ACL SETUSER", "default", "off")
        block = make(100_000)
        with contextlib.closing(open_store(f"redis://kv:hush@{server.address}")) as store:
            assert put(store, block) == [PutStatus.STORED]
            assert get(store, block)[0].header is not None
            assert store.lookup(NameQuery([name_of(block)], ttl=30.0), TIMEOUT).lead == 1
            assert store.stats(TIMEOUT).entries == 1
        with contextlib.closing(open_store(f"redis://reader:hush@{server.address}")) as store:
            assert get(store, block)[0].header is not None
            with pytest.raises(Unavailable, match="NOPERM"):
                put(store, make())
        for wrong in ("kv:hushhush@", "nobody:hush@", ""):
            with contextlib.closing(open_store(f"redis://{wrong}{server.address}")) as store:
                with pytest.raises(Unavailable, match=r"(?i)wrongpass|auth|password") as caught:
                    get(store, block)
                assert "hush" not in str(caught.value)
        with contextlib.closing(open_store(f"redis://kv:hush@{server.address}")) as store:
            assert store.clear(TIMEOUT) == 1
    assert "hush" not in caplog.text + "".join(capfd.readouterr())
