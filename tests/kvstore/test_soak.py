"""Many at once, for a while, at the limit of the budget: nothing is lost and nothing is kept."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from kvblock.header import decode
from kvblock.verify import verify_payload
from kvstore import Block, Kept, Want
from kvstore.base import Store
from kvstore.records import Claim, Verdict
from kvstore.remote import RemoteStore
from kvstore.vault import Limits, Vault
from kvstore.ways import ORDER
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.test_conformance import TIMEOUT, make, name_of, offer

SECONDS = 3.0


def at_once(*jobs: Callable[[random.Random], None]) -> None:
    """Runs each job again and again in a thread of its own; the first error is raised."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    errors: list[BaseException] = []
    end = time.monotonic() + SECONDS

    def work(job: Callable[[random.Random], None], source: random.Random) -> None:
        try:
            while time.monotonic() < end and not errors:
                job(source)
        except BaseException as error:  # noqa: BLE001 - the edge of a thread: raised by its starter
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(job, random.Random(seed + number)))
        for number, job in enumerate(jobs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


def test_readers_and_writers_on_every_way_lose_nothing_and_keep_nothing() -> None:
    process, url = start_service("--budget=6MiB", "--ticket-life=5", "--max-block=2MiB")
    address = url.removeprefix("kvrelay://")
    blocks = [make(size) for size in (200, 5_000, 70_000, 300_000, 1_000_000) for _ in range(12)]
    stores: list[RemoteStore] = [RemoteStore(address, ORDER[n % 3]) for n in range(12)]
    taken = [0] * 8

    def writer(store: Store) -> Callable[[random.Random], None]:
        def put_some(source: random.Random) -> None:
            some = source.sample(blocks, source.randrange(1, 6))
            for outcome in store.put([offer(block) for block in some], TIMEOUT):
                assert outcome.kept in (Kept.STORED, Kept.EXISTED, Kept.NO_ROOM)

        return put_some

    def reader(number: int, store: Store) -> Callable[[random.Random], None]:
        def get_some(source: random.Random) -> None:
            some: list[Block] = source.sample(blocks, source.randrange(1, 6))
            found = store.lookup([name_of(block) for block in some], [], 5.0, TIMEOUT)
            wants = [Want(name_of(b), memoryview(bytearray(b.payload.nbytes))) for b in some]
            for got in store.get(wants, TIMEOUT):
                assert got.header is not None or got.index >= found.lead  # held by the lease
                if got.header is not None:
                    assert got.header == some[got.index].header
                    assert wants[got.index].buffer == some[got.index].payload
                    verify_payload(decode(got.header), wants[got.index].buffer, got.summed)
                    taken[number] += 1
            store.release([] if found.lease is None else [found.lease], TIMEOUT)

        return get_some

    try:
        readers = [reader(number, stores[number]) for number in range(8)]
        at_once(*readers, *(writer(store) for store in stores[8:]))
        assert all(taken)
        stats = stores[0].stats(TIMEOUT)
        assert stats.tally.evicted > 0
        assert (stats.leases, stats.leased_bytes) == (0, 0)
        assert (stats.reservations, stats.reserved_bytes) == (0, 0)
        assert stats.tally.corrupt == 0
        assert all(store.breaks == {} for store in stores)
    finally:
        for store in stores:
            store.close()
        stop(process)


def test_every_place_of_the_arena_has_one_owner_and_comes_back() -> None:
    vault = Vault(Limits(3 << 20, ticket_life=0.05))
    blocks = [make(size) for size in (100, 900, 9_000, 90_000, 700_000) for _ in range(10)]

    def write(source: random.Random) -> None:
        some = source.sample(blocks, 4)
        grant = vault.reserve([Claim(name_of(b), b.size, source.random() < 0.2) for b in some])
        for block, verdict in zip(some, grant.verdicts, strict=True):
            if verdict is not Verdict.RESERVED or grant.ticket is None or source.random() < 0.1:
                continue
            slot = vault.slot(grant.ticket, name_of(block))
            if slot is None:
                continue  # the ticket ran out meanwhile
            if source.random() < 0.1:
                time.sleep(0.06)  # longer than the ticket lives
            slot.fill(memoryview(block.header + bytes(block.payload)))
            if source.random() < 0.9:
                assert slot.keep().kept in (Kept.STORED, Kept.EXPIRED)
            slot.drop()
        if grant.ticket is not None and source.random() < 0.8:
            vault.abandon(grant.ticket)

    def read(source: random.Random) -> None:
        some = source.sample(blocks, 6)
        found = vault.locate([name_of(b) for b in some], 10.0)
        for block, place in zip(some, found.blocks, strict=True):
            if place is not None:
                assert place[0] == block.size
                assert bytes(vault.arena.view(place[1], place[0])[-100:]) == block.payload[-100:]
        if found.lease is not None:
            vault.release([found.lease])

    at_once(*([write] * 4), *([read] * 4))
    assert vault.stats().tally.stored > 100
    time.sleep(0.06)  # the last tickets end
    vault.clear()
    stats = vault.stats()
    assert (stats.entries, stats.bytes, stats.leases, stats.reservations) == (0, 0, 0, 0)
    slots = vault.arena.slots
    assert (slots.used, slots.free_runs, slots.longest) == (0, 1, slots.capacity)
