"""Redis behind what networks do: TLS, cuts, delays, flipped bits, silence."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.cli.authority import CertificateAuthority
from kvrelay.errors import DeadlineExceeded, KvrelayError, Unavailable
from kvstore import Block, PutStatus, Want
from kvstore.base import NameQuery
from kvstore.redis import RedisStore
from tests.failures.proxy import Faults, Proxy
from tests.kvstore import rig
from tests.kvstore.conftest import serving
from tests.kvstore.redis.redisserver import Cluster, Server
from tests.kvstore.rig import (
    TIMEOUT,
    PausedClock,
    get,
    make,
    name_of,
    open_store,
    present,
    put,
)
from tests.secured import Files, write_files

SHORT = 0.7
PATIENCE = 60.0


def accepted(store: RedisStore, blocks: list[Block], timeout: float = TIMEOUT) -> tuple[int, int]:
    """As a careful reader says; a store that fails ends it."""
    return rig.accepted(store, blocks, timeout, KvrelayError)


def until_all_come(store: RedisStore, blocks: list[Block]) -> None:
    """A server that is well again is found again."""
    deadline = time.monotonic() + PATIENCE
    while accepted(store, blocks) != (len(blocks), 0):
        assert time.monotonic() < deadline
        time.sleep(0.02)


# One server


@pytest.fixture
def proxied(redis_server: Server) -> Iterator[tuple[RedisStore, Proxy]]:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    with redis_server.client() as client:
        client.flushall()
    with Proxy(redis_server.address, seed) as proxy:
        store = open_store(f"redis://{proxy.address}")
        yield store, proxy
        store.close()


@pytest.mark.parametrize("size", [1000, 700_000])
@pytest.mark.parametrize("cut", [0, 1, 40, 5000, 2_000_000])
def test_cut_while_blocks_are_read(proxied: tuple[RedisStore, Proxy], size: int, cut: int) -> None:
    store, proxy = proxied
    blocks = [make(size) for _ in range(8)]
    put(store, *blocks)
    proxy.down.faults = Faults(cut_after=cut)
    proxy.cut()
    taken, refused = accepted(store, blocks)
    assert refused == 0
    assert taken <= 8
    proxy.heal()
    until_all_come(store, blocks)


@pytest.mark.parametrize("cut", [0, 100, 500_000, 3_000_000])
def test_cut_while_blocks_are_written(proxied: tuple[RedisStore, Proxy], cut: int) -> None:
    store, proxy = proxied
    blocks = [make(700_000) for _ in range(8)]
    proxy.up.faults = Faults(cut_after=cut)
    with contextlib.suppress(Unavailable):
        kept = put(store, *blocks)
        assert kept[0] in (PutStatus.STORED, PutStatus.EXISTED)
    proxy.heal()
    deadline = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(Unavailable):
            assert set(put(store, *blocks)) <= {PutStatus.STORED, PutStatus.EXISTED}
            break
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert accepted(store, blocks) == (8, 0), "what there is, is whole"


@pytest.mark.parametrize("every", [pytest.param(200, marks=pytest.mark.slow), 5_000, 300_000])
def test_flipped_bits_are_never_taken_for_a_block(
    proxied: tuple[RedisStore, Proxy], every: int
) -> None:
    store, proxy = proxied
    blocks = [make(100_000) for _ in range(8)]
    put(store, *blocks)
    for faulty in (proxy.down, proxy.up):
        faulty.faults = Faults(flip_every=every)
        for _ in range(3):
            accepted(store, blocks, SHORT)
            with contextlib.suppress(KvrelayError):
                put(store, *[make(50_000) for _ in range(4)])
            with contextlib.suppress(KvrelayError):
                store.lookup(NameQuery([name_of(b) for b in blocks], ttl=30.0), SHORT)
        proxy.heal()
        proxy.cut()
    # What was flipped on its way up lies there wrong: readers refuse it, and the rest is well.
    deadline = time.monotonic() + PATIENCE
    while sum(accepted(store, blocks)) < len(blocks):
        with contextlib.suppress(KvrelayError):
            put(store, *blocks)
        assert time.monotonic() < deadline


def test_a_slow_network_is_no_error(proxied: tuple[RedisStore, Proxy]) -> None:
    store, proxy = proxied
    proxy.up.faults = proxy.down.faults = Faults(delay=0.01, jitter=0.02)
    blocks = [make(60_000) for _ in range(10)]
    assert set(put(store, *blocks)) == {PutStatus.STORED}
    assert accepted(store, blocks) == (10, 0)


def test_silence_ends_with_the_time_given(
    breaker_clock: PausedClock, proxied: tuple[RedisStore, Proxy]
) -> None:
    store, proxy = proxied
    blocks = [make(60_000) for _ in range(4)]
    put(store, *blocks)
    proxy.down.faults = Faults(black_hole=True)
    wants = [Want(name_of(b), memoryview(bytearray(60_000))) for b in blocks]
    before = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        list(store.get(wants, SHORT))
    with pytest.raises(DeadlineExceeded):
        store.lookup(NameQuery([name_of(blocks[0])], ttl=30.0), SHORT)
    with pytest.raises(Unavailable, match="next try"):
        store.lookup(NameQuery([name_of(blocks[0])], ttl=30.0), PATIENCE)
    assert time.monotonic() - before < PATIENCE
    breaker_clock.go_on()
    proxy.heal()
    until_all_come(store, blocks)


# A cluster, each of its servers behind a proxy that it announces as itself


class Stand:
    """Three servers, their proxies and the URL to reach them by."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, tls: Files | None) -> None:
        made: dict[str, Proxy] = {}

        def announce(address: str) -> int:
            proxy = Proxy(address, tls=serving(tls) if tls else None)
            made[address] = stack.enter_context(proxy)
            return int(proxy.address.rpartition(":")[2])

        self.cluster = Cluster(folder, announce=announce)
        stack.callback(self.cluster.kill)
        self.proxies = [made[server.address] for server in self.cluster.servers]
        addresses = ",".join(proxy.address for proxy in self.proxies)
        self.url = (
            f"rediss+cluster://{addresses}?ca={tls.ca}" if tls else f"redis+cluster://{addresses}"
        )
        ports = {int(proxy.address.rpartition(":")[2]) for proxy in self.proxies}
        deadline = time.monotonic() + PATIENCE
        while not all(_told(server) == ports for server in self.cluster.servers):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def _told(server: Server) -> set[int]:
    """The ports that a server tells others to use."""
    with server.client() as client:
        return {entry[2][1] for entry in client.execute_command("CLUSTER SLOTS")}


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("cluster-tls"), "node", CertificateAuthority())


@pytest.fixture(scope="module", params=["plain", pytest.param("tls", marks=pytest.mark.slow)])
def stand(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, certified: Files
) -> Iterator[Stand]:
    with contextlib.ExitStack() as stack:
        tls = certified if request.param == "tls" else None
        yield Stand(tmp_path_factory.mktemp("stand"), stack, tls)


@pytest.fixture
def behind(stand: Stand) -> Iterator[tuple[RedisStore, Stand]]:
    for proxy in stand.proxies:
        proxy.heal()
    stand.cluster.flush()
    store = open_store(stand.url)
    yield store, stand
    store.close()


def test_a_cluster_is_reached_by_what_its_servers_announce(
    behind: tuple[RedisStore, Stand],
) -> None:
    store, stand = behind
    blocks = [make(50_000) for _ in range(30)]
    assert set(put(store, *blocks)) == {PutStatus.STORED}
    assert accepted(store, blocks) == (30, 0)
    assert all(proxy.down.passed > 50_000 for proxy in stand.proxies)


@pytest.mark.slow
def test_a_silent_server_costs_its_own_blocks_only(behind: tuple[RedisStore, Stand]) -> None:
    store, stand = behind
    blocks = [make(20_000) for _ in range(40)]
    put(store, *blocks)
    before = present(store, *blocks)
    stand.proxies[1].down.faults = Faults(black_hole=True)
    lost = {n for n, block in enumerate(blocks) if owner(stand, store, block) == 1}
    assert all(before)
    assert 3 < len(lost) < 30
    seen = store.survey(NameQuery([name_of(b) for b in blocks], ttl=30.0), TIMEOUT)
    assert {n for n, size in enumerate(seen.sizes) if size is None} == lost
    taken, refused = accepted(store, blocks)
    assert (taken, refused) == (len(blocks) - len(lost), 0)
    again = put(store, *blocks)
    assert set(again) <= {PutStatus.STORED, PutStatus.EXISTED}, "the second place takes them"
    assert accepted(store, blocks) == (len(blocks), 0)
    stand.proxies[1].heal()
    until_all_come(store, blocks)


def test_servers_that_are_cut_off_in_turn(behind: tuple[RedisStore, Stand]) -> None:
    store, stand = behind
    blocks = [make(300_000) for _ in range(12)]
    put(store, *blocks)
    for proxy in stand.proxies:
        proxy.down.faults = Faults(cut_after=400_000)
        proxy.cut()
        assert accepted(store, blocks)[1] == 0
        proxy.heal()
    until_all_come(store, blocks)


def test_when_no_server_is_there_all_is_unreachable(behind: tuple[RedisStore, Stand]) -> None:
    store, stand = behind
    block = make()
    put(store, block)
    for proxy in stand.proxies:
        proxy.up.faults = proxy.down.faults = Faults(cut_after=0)
        proxy.cut()
    with pytest.raises(KvrelayError):
        store.lookup(NameQuery([name_of(block)], ttl=30.0), SHORT)
    with pytest.raises(KvrelayError):
        put(store, make())
    for proxy in stand.proxies:
        proxy.heal()
    until_all_come(store, [block])


def owner(stand: Stand, store: RedisStore, block: Block) -> int:
    """The number of the server of a block's first place."""
    with stand.cluster.servers[0].client() as client:
        key = store._topology.key(name_of(block)).decode()
        slot = int(client.execute_command("CLUSTER KEYSLOT", key))
    return next(n for n in range(3) if slot < 16384 * (n + 1) // 3)


# TLS


@pytest.fixture
def safe(redis_server: Server, certificates: Files) -> Iterator[Proxy]:
    with Proxy(redis_server.address, tls=serving(certificates, mutual=True)) as proxy:
        yield proxy


def test_both_ends_show_a_certificate(safe: Proxy, certificates: Files) -> None:
    files = f"ca={certificates.ca}&cert={certificates.cert}&key={certificates.key}"
    with contextlib.closing(open_store(f"rediss://{safe.address}?{files}")) as store:
        block = make(3 << 20)
        assert put(store, block) == [PutStatus.STORED]
        assert get(store, block)[0].header is not None
        assert store.stats(TIMEOUT).entries > 0
    nobody = open_store(f"rediss://{safe.address}?ca={certificates.ca}")
    with contextlib.closing(nobody), pytest.raises(Unavailable):
        put(nobody, block)


def test_a_server_that_is_not_who_it_should_be_is_not_talked_to(
    safe: Proxy, redis_server: Server, certificates: Files, tmp_path: Path
) -> None:
    others = write_files(tmp_path, "other", CertificateAuthority())
    elsewhere = write_files(tmp_path, "elsewhere", CertificateAuthority(), hosts=("redis.example",))
    mine = f"cert={certificates.cert}&key={certificates.key}"
    with Proxy(redis_server.address, tls=serving(elsewhere)) as misnamed:
        urls = {
            f"rediss://{safe.address}?ca={others.ca}&{mine}": "certificate",
            f"rediss://{safe.address}?{mine}": "certificate",
            f"rediss://{misnamed.address}?ca={elsewhere.ca}": "certificate",
            f"rediss://{redis_server.address}?ca={certificates.ca}": None,
            f"redis://{safe.address}": None,
        }
        for url, why in urls.items():
            store = open_store(url)
            gone = pytest.raises((Unavailable, DeadlineExceeded), match=why)
            with contextlib.closing(store), gone:
                store.lookup(NameQuery([b"n" * 32]), TIMEOUT)
