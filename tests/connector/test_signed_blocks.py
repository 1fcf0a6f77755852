"""A party without the fleet's key writes to the fleet's store: every such block is a miss."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.block.header import checksum, checksums, seal
from kvrelay.block.mac import BlockKey
from kvrelay.engine.core.external import Loaded, Saved
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.credentials import Credentials
from kvrelay.rpc.security.policy import Security
from kvstore import Store, connect
from kvstore.base import GetResult, NameQuery, Want
from kvstore.client import remote
from kvstore.client.memory import MemoryStore, forget
from tests.connector.rig import PATIENT, SPACE, B, Worker, blocks_for
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.redis.redisserver import Server, running

FLEET = b"f" * 32
KEYED = replace(PATIENT, key=BlockKey(FLEET))
STRANGER = replace(PATIENT, key=BlockKey(b"s" * 32))
PROMPTS = 12
COUNT = 3
NUMBERS = itertools.count()


@pytest.fixture(params=["memory", "kvrelay", "redis"])
def url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A store that anyone can write to; its clients here, and the service, have the fleet's key."""
    monkeypatch.setattr(policy, "_installed", Security(credentials=Credentials(None, FLEET)))
    monkeypatch.setattr(remote, "RECHECK_SECONDS", 20.0)
    if request.param == "memory":
        name = f"signed-{next(NUMBERS)}"
        yield f"memory://{name}"
        forget(name)
    elif request.param == "kvrelay":
        monkeypatch.setenv("KVRELAY_FLEET_KEY", "the-fleet-key-of-the-test")
        process, made = start_service("--budget=16MiB")
        yield made
        stop(process)
    else:
        with running(server := Server(tmp_path)):
            yield f"redis://{server.address}"


def prompts() -> list[list[int]]:
    return [[1000 * number + at for at in range(COUNT * B)] for number in range(1, PROMPTS + 1)]


def saved(worker: Worker, tokens: list[int]) -> None:
    worker.fill(tokens, blocks_for(len(tokens)))
    worker.save("s", tokens, blocks_for(len(tokens)))
    event = worker.event()
    assert isinstance(event, Saved)
    assert event.stored == COUNT


def loaded(worker: Worker, tokens: list[int]) -> int:
    """Positions that were loaded and verified; they hold what was saved."""
    count = len(tokens)
    worker.load("r", (*tokens, 7), 0, count, blocks_for(count))
    event = worker.event()
    assert isinstance(event, Loaded)
    assert worker.holds(tokens, 0, event.valid, blocks_for(event.valid))
    return event.valid


@pytest.mark.cluster
def test_blocks_that_a_stranger_made_are_misses(url: str) -> None:
    """With names that follow from their headers and right checksums: 12 of 12 fail to poison."""
    for options in (PATIENT, STRANGER):
        stranger = Worker(connect(url), options)
        ours = Worker(connect(url), KEYED)
        for tokens in prompts():
            saved(stranger, tokens)
            assert loaded(stranger, tokens) == len(tokens)  # it believes its own
            assert loaded(ours, tokens) == 0
        assert ours.counters.corrupt >= PROMPTS  # and the rest of each load, checked afterwards
        names = [name for tokens in prompts() for name in ours.namer.chain(tokens, B)]
        # A check that runs when its connector closes has half a second to give back its lease.
        ours.until(lambda: not ours.connector._rechecking)  # noqa: B023
        stranger.connector.close()
        ours.connector.close()
        with closing(connect(url)) as store:
            assert emptied(store, names)  # no lease outlives its connector


def emptied(store: Store, names: Sequence[bytes]) -> bool:
    """Clear the store; whether none of the blocks was held by a reader."""
    store.clear(20)
    return not any(store.survey(NameQuery(names), 20).sizes)


@pytest.mark.cluster
def test_a_member_of_the_fleet_is_believed(url: str) -> None:
    one, two = Worker(connect(url), KEYED), Worker(connect(url), KEYED)
    for tokens in prompts():
        saved(one, tokens)
        assert loaded(two, tokens) == len(tokens)
    assert two.counters.corrupt == 0
    one.connector.close()
    two.connector.close()


@pytest.mark.cluster
def test_a_forged_payload_under_a_real_header_is_a_miss(tmp_path: Path) -> None:
    """Who may write to Redis keeps header and tag of a block, and makes the checksums right."""
    with running(server := Server(tmp_path)):
        worker = Worker(connect(f"redis://{server.address}"), KEYED)
        for tokens in prompts():
            saved(worker, tokens)
            key = f"kvrelay:{worker.namer.chain(tokens, B)[0].hex()}"
            with server.client() as client:
                value = client.get(key) or b""
                split = int.from_bytes(value[12:16], "little")
                payload = bytes(len(value) - split)
                forged = seal(value[:split], payload, checksums(payload, 1), None)
                # With the tags of the real block.
                body = forged[24:32] + value[32:48] + forged[48:200] + value[200:216] + forged[216:]
                own = checksum(forged[:16] + body).to_bytes(8, "little")
                client.set(key, forged[:16] + own + body + payload)
            assert loaded(worker, tokens) == 0
        assert worker.counters.corrupt >= PROMPTS
        worker.connector.close()


@pytest.mark.cluster
@pytest.mark.parametrize("url", ["kvrelay", "redis"], indirect=True)
def test_a_refused_block_is_removed_and_put_again(url: str, request: pytest.FixtureRequest) -> None:
    """Where store or client know the key: one stranger's block does not stay a miss for ever."""
    if "kvrelay" in url:
        key = BlockKey.of(_derived("the-fleet-key-of-the-test"))
    else:
        key = BlockKey(FLEET)
    stranger, ours = Worker(connect(url), STRANGER), Worker(connect(url), replace(PATIENT, key=key))
    tokens = prompts()[0]
    saved(stranger, tokens)
    valid = [loaded(ours, tokens)]
    while valid[-1] < len(tokens) and len(valid) <= COUNT:
        saved(ours, tokens)  # as computed after the load
        valid.append(loaded(ours, tokens))
    assert valid[0] == 0
    assert valid[-1] == len(tokens)
    assert len(set(valid)) == len(valid), "each load makes progress"
    stranger.connector.close()
    ours.connector.close()


@pytest.mark.cluster
@pytest.mark.parametrize("url", ["kvrelay", "redis"], indirect=True)
def test_two_fleets_on_one_store_keep_their_blocks(url: str) -> None:
    """The store has the first fleet's key; a reader may leave at a right block of either."""
    keys = [_derived("the-fleet-key-of-the-test") or b"", b"s" * 32]
    spaces = [replace(SPACE, fleet_key_id=Credentials(None, key).fleet_key_id) for key in keys]
    fleets = [
        Worker(connect(url), replace(PATIENT, key=BlockKey(key)), space=space)
        for key, space in zip(keys, spaces, strict=True)
    ]
    tokens = prompts()[0]
    for worker in fleets:
        saved(worker, tokens)
    for worker, key in zip(fleets, keys, strict=True):
        buffer = memoryview(bytearray(worker.pool.nbytes(B)))
        for name in worker.namer.chain(tokens, B):
            for signed in (None, BlockKey(key)):
                want = Want(name, buffer, key=signed)
                with closing(worker.connector._context.store.get([want, want], 20)) as arriving:
                    assert next(arriving).header is not None  # and it leaves
    for worker in fleets:
        assert loaded(worker, tokens) == len(tokens)
        assert worker.counters.corrupt == 0
    for worker in fleets:
        worker.connector.close()


def _derived(fleet_key: str) -> bytes | None:
    from kvrelay.rpc.security.credentials import load
    from kvrelay.rpc.security.options import SecurityOptions

    return load(SecurityOptions(fleet_key=fleet_key)).fleet_key


def test_fleets_with_different_keys_have_different_names() -> None:
    """So they can share a store: neither occupies the names of the other."""
    named = [
        replace(SPACE, fleet_key_id=Credentials(None, key).fleet_key_id)
        for key in (None, FLEET, b"s" * 32)
    ]
    assert len({space.digest for space in named}) == 3


def test_the_store_keeps_what_it_cannot_judge() -> None:
    """Without the key a store serves signed blocks as any others."""
    name = f"signed-{next(NUMBERS)}"
    store: Store = MemoryStore(name)
    worker = Worker(store, KEYED)
    tokens = prompts()[0]
    saved(worker, tokens)
    first = worker.namer.chain(tokens, B)[0]
    (size,) = store.survey(NameQuery([first]), 20).sizes
    assert size is not None
    (got,) = store.get([Want(first, memoryview(bytearray(worker.pool.nbytes(B))))], 20)
    assert got.header is not None
    assert got.header[32:48] != bytes(16)
    worker.connector.close()
    forget(name)


class Rechecked(MemoryStore):
    """Records the blocks that readers refused."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.refused: list[bytes] = []
        self.gets = threading.Semaphore(0)

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        try:
            yield from super().get(wants, timeout)
        finally:
            self.gets.release()

    def _recheck(self, name: bytes) -> None:
        self.refused.append(name)


def test_right_blocks_after_a_wrong_one_are_not_refused() -> None:
    """They are read again after the load, with the same key."""
    name = f"signed-{next(NUMBERS)}"
    stranger, tokens = Worker(MemoryStore(name), STRANGER), prompts()[0]
    saved_first(stranger, tokens)
    store = Rechecked(name)
    ours = Worker(store, KEYED)
    saved(ours, tokens)
    assert loaded(ours, tokens) == 0
    for _ in range(COUNT):  # the load, and then each block after the wrong one
        assert store.gets.acquire(timeout=20)
    ours.connector.close()
    assert set(store.refused) == {ours.namer.chain(tokens, B)[0]}
    stranger.connector.close()
    forget(name)


class Held(Rechecked):
    """Blocks that are read alone wait until they may be read."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.alone: list[bytes] = []
        self.go = threading.Event()

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        if len(wants) == 1:
            self.alone.append(wants[0].name)
            assert self.go.wait(20)
        yield from super().get(wants, timeout)


def test_many_loads_that_stop_at_one_block_check_the_rest_once() -> None:
    name = f"signed-{next(NUMBERS)}"
    stranger, tokens = Worker(MemoryStore(name), STRANGER), prompts()[0]
    saved_first(stranger, tokens)
    store = Held(name)
    ours = Worker(store, KEYED)
    saved(ours, tokens)
    for _ in range(6):
        assert loaded(ours, tokens) == 0
    store.go.set()
    for _ in range(6 + COUNT - 1):
        assert store.gets.acquire(timeout=20)
    assert loaded(ours, tokens) == 0  # and later it is checked again
    for _ in range(COUNT):
        assert store.gets.acquire(timeout=20)
    ours.connector.close()
    assert store.alone == 2 * ours.namer.chain(tokens, B)[1:COUNT]
    stranger.connector.close()
    forget(name)


def saved_first(worker: Worker, tokens: list[int]) -> None:
    """Save the first block only."""
    first = tokens[:B]
    worker.fill(first, blocks_for(len(first)))
    worker.save("s", first, blocks_for(len(first)))
    assert isinstance(worker.event(), Saved)
