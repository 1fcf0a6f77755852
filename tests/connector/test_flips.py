"""Every byte of a header and a thousand of payloads, flipped in the store: none is taken.

The reader that met one computes the block and puts it again, and the next reader loads it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.block.header import header_bytes
from kvrelay.block.mac import BlockKey
from kvrelay.connector.context import ConnectorOptions
from kvrelay.engine.core.external import Loaded
from kvrelay.rpc.deadline import Deadline
from kvrelay.usage import Miss
from kvrelay.v1 import store_pb2 as pb
from kvstore import connect
from kvstore.client import remote
from kvstore.client.remote import RemoteStore
from tests.connector.rig import PATIENT, B, Worker, blocks_for
from tests.connector.test_store import saved
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.disk.rig import until
from tests.kvstore.redis.redisserver import Server, running
from tests.kvstore.redis.spoil import WRONG, Spoil
from tests.kvstore.rig import arena_in

COUNT = 3
TOKENS = tuple(range(100, 100 + COUNT * B))
HEADER = header_bytes(B, 1)
SIGNED = replace(PATIENT, key=BlockKey(b"f" * 32))
STRANGER = replace(PATIENT, key=BlockKey(b"s" * 32))


class Bench:
    """A service, a worker that puts and reads, and the service's memory."""

    def __init__(self, url: str, pid: int, arena: int, options: ConnectorOptions) -> None:
        self.worker = Worker(connect(url), options)
        self._names = self.worker.namer.chain(TOKENS, B)
        self.direct = RemoteStore(url.partition("?")[0].removeprefix("kvrelay://"))
        self._arena = arena
        self._memory = open(f"/proc/{pid}/mem", "r+b", buffering=0)  # noqa: SIM115 - kept open
        self.save()
        self.payload = self._located().lengths[0] - HEADER

    def save(self) -> None:
        """What is not there is put, as computed."""
        saved(self.worker, TOKENS)

    def flip(self, block: int, offset: int, mask: int) -> None:
        """In the store's memory, wherever the block lies now."""
        place = self._arena + self._located().offsets[block] + offset
        self._memory.seek(place)
        (byte,) = self._memory.read(1)
        self._memory.seek(place)
        self._memory.write(bytes([byte ^ mask]))

    def load(self) -> int:
        """Tokens that a load takes; they are right."""
        self.worker.load("r", (*TOKENS, 7), 0, len(TOKENS), blocks_for(len(TOKENS)))
        event = self.worker.event()
        assert isinstance(event, Loaded)
        assert self.worker.holds(TOKENS, 0, event.valid, blocks_for(event.valid))
        # The blocks after a wrong one are read again: one that is flipped then is no longer there.
        self.worker.until(lambda: not self.worker.connector._rechecking)
        return event.valid

    def close(self) -> None:
        self._memory.close()
        self.direct.close()
        self.worker.connector.close()

    def _located(self) -> pb.LocateResponse:
        found = self.direct._calls.locate(self._names, 60_000, Deadline.after(20))
        self.direct._calls.release_lease(found.boot, found.lease, 20)
        return found


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("transport", "headers", "payloads", "options"),
    [
        pytest.param("shm", 1, 1000, PATIENT, marks=pytest.mark.slow),
        ("socket", 8, 40, PATIENT),
        ("grpc", 8, 40, PATIENT),
        ("shm", 3, 200, SIGNED),
        ("socket", 16, 40, SIGNED),
        ("grpc", 16, 40, SIGNED),
    ],
    ids=["shm", "socket", "grpc", "shm-signed", "socket-signed", "grpc-signed"],
)
def test_no_flipped_byte_is_ever_taken_and_each_is_put_anew(
    transport: str,
    headers: int,
    payloads: int,
    options: ConnectorOptions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every byte of a header (on the slower transports every eighth) and so many of payloads."""
    monkeypatch.setattr(remote, "RECHECK_SECONDS", 20.0)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    process, url = start_service("--budget=4MiB")
    bench = Bench(f"{url}?transport={transport}", process.pid, arena_in(process), options)
    try:
        assert bench.load() == len(TOKENS)
        places = list(range(0, HEADER, headers))
        places += [HEADER + chance.randrange(bench.payload) for _ in range(payloads)]
        for number, offset in enumerate(places, 1):
            block = chance.randrange(COUNT)
            bench.flip(block, offset, chance.randrange(1, 256))
            assert bench.load() == block * B, (block, offset)
            assert bench.worker.counters.corrupt == number
            bench.save()
            assert bench.load() == len(TOKENS), "it was put anew"
        until(lambda: bench.direct.stats(20).leases == 0)
        stats = bench.direct.stats(20)
        assert (stats.counters.corrupt, stats.counters.stored) == (number, COUNT + number)
        assert stats.bytes == COUNT * (HEADER + bench.payload)
    finally:
        bench.close()
        stop(process)


@pytest.mark.parametrize("options", [PATIENT, SIGNED], ids=["plain", "signed"])
def test_a_block_flipped_in_redis_is_put_again_by_its_reader(
    tmp_path: Path, options: ConnectorOptions
) -> None:
    server = Server(tmp_path)
    with running(server):
        worker = Worker(connect(f"redis://{server.address}"), options)
        saved(worker, TOKENS)
        key = f"kvrelay:{worker.namer.chain(TOKENS, B)[1].hex()}"
        with server.client() as client:
            value = bytearray(client.get(key) or b"")
            value[-1] ^= 1
            client.set(key, bytes(value))
        for valid in (B, len(TOKENS)):
            worker.load("r", (*TOKENS, 7), 0, len(TOKENS), blocks_for(len(TOKENS)))
            event = worker.event()
            assert isinstance(event, Loaded)
            assert event.valid == valid
            saved(worker, TOKENS)  # as computed after the load
        assert worker.counters.corrupt == 1
        worker.connector.close()


@pytest.mark.parametrize("first", WRONG, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("options", [PATIENT, SIGNED], ids=["plain", "signed"])
def test_a_chain_with_many_wrong_values_in_redis_heals_after_one_load(
    tmp_path: Path, options: ConnectorOptions, first: Spoil
) -> None:
    """Whatever is wrong with the first and with each of the others; signed: also foreign blocks."""
    spoils = [first, *WRONG]
    tokens = tuple(range(100, 100 + (2 + len(spoils)) * B))
    server = Server(tmp_path)
    with running(server):
        worker = Worker(connect(f"redis://{server.address}"), options)
        keys = [f"kvrelay:{name.hex()}".encode() for name in worker.namer.chain(tokens, B)]
        with server.client() as client:
            if options is SIGNED:
                stranger = Worker(connect(f"redis://{server.address}"), STRANGER)
                saved(stranger, tokens)
                client.delete(*keys[:-1])
                stranger.connector.close()
            saved(worker, tokens)
            for key, spoil in zip(keys[1:], spoils, strict=False):
                spoil(client.get(key) or b"", client, key)
        for valid in (B, len(tokens)):
            assert worker.ask("r", (*tokens, 7)) == len(tokens)
            worker.load("r", (*tokens, 7), 0, len(tokens), blocks_for(len(tokens)))
            event = worker.event()
            assert isinstance(event, Loaded)
            assert event.valid == valid
            assert event.missed in (Miss.FAILED_VERIFICATION, Miss.OTHER_NAMESPACE, None)
            assert worker.holds(tokens, 0, valid, blocks_for(valid))
            saved(worker, tokens)  # as computed after the load
        assert worker.counters.corrupt == 1  # a request met one wrong block
        worker.connector.close()
