"""``python -m tests.kvstore.soak``: 8 readers and 4 writers at once on a store as a process.

At the limit of its budget, by every transport; every byte is compared, and nothing is held at last.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.block.header import decode
from kvrelay.block.verify import verify_payload
from kvrelay.config.reader import load, option
from kvstore import Block, PutStatus, Want
from kvstore.base import NameQuery, Store
from kvstore.client.remote import RemoteStore
from kvstore.client.transports.selector import TRANSPORTS
from kvstore.stats import StoreStats
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.rig import TIMEOUT, make, name_of, offer

SIZES = (200, 5_000, 70_000, 300_000, 1_000_000)
READERS, WRITERS = 8, 4
LATE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakConfig:
    """How long, and with what."""

    seconds: float = option(60.0, "how long", low=0.1)
    seed: int | None = option(None, "of all that is drawn; default: another one each time")
    disk: bool = option(False, "with a disk below the memory, which is too small as well")


@dataclass(frozen=True, slots=True)
class Report:
    """What was there at the end. ``taken`` are the blocks each reader got and compared."""

    stats: StoreStats
    taken: tuple[int, ...]
    put: int
    breaks: int

    def check(self) -> None:
        """``AssertionError`` if something was lost or is still held."""
        stats = self.stats
        assert all(self.taken), "a reader got nothing"
        assert stats.counters.evicted > 0, "the budget was never reached"
        assert (stats.leases, stats.leased_bytes) == (0, 0), "leases are left"
        assert (stats.reservations, stats.reserved_bytes) == (0, 0), "reservations are left"
        assert (stats.counters.corrupt, self.breaks) == (0, 0), "something broke"
        if stats.disk is not None:
            assert stats.disk.counters.read > 0, "nothing came from disk"
            assert (stats.disk.counters.corrupt, stats.disk.counters.failed) == (0, 0), "a bad disk"
            assert stats.disk.bytes <= stats.disk.budget


def at_once(
    seconds: float,
    seed: int | None,
    jobs: Sequence[Callable[[random.Random], None]],
    enough: Callable[[], bool],
) -> None:
    """Runs each job again and again in a thread of its own; the first error is raised.

    A slow machine goes on after ``seconds`` until it was ``enough``.
    """
    seed = random.randrange(1 << 32) if seed is None else seed
    print(f"seed {seed}", flush=True)
    errors: list[BaseException] = []
    end = time.monotonic() + seconds
    latest = end + LATE_SECONDS

    def over() -> bool:
        now = time.monotonic()
        return now >= latest or (now >= end and enough())

    def work(job: Callable[[random.Random], None], source: random.Random) -> None:
        try:
            while not errors and not over():
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


class Soak:
    """The blocks that all read and write, and what was counted."""

    def __init__(self) -> None:
        self.blocks = [make(size) for size in SIZES for _ in range(12)]
        self.taken = [0] * READERS
        self.put = [0] * WRITERS

    def writer(self, number: int, store: Store) -> Callable[[random.Random], None]:
        """Puts some of the blocks."""

        def put_some(source: random.Random) -> None:
            some = source.sample(self.blocks, source.randrange(1, 6))
            for outcome in store.put([offer(block) for block in some], TIMEOUT):
                assert outcome.status in (PutStatus.STORED, PutStatus.EXISTED, PutStatus.NO_ROOM), (
                    outcome
                )
                self.put[number] += 1

        return put_some

    def reader(self, number: int, store: Store) -> Callable[[random.Random], None]:
        """Looks some up, gets all of them: what the lease holds must come, and be right."""

        def get_some(source: random.Random) -> None:
            some: list[Block] = source.sample(self.blocks, source.randrange(1, 6))
            found = store.lookup(NameQuery([name_of(block) for block in some], ttl=10.0), TIMEOUT)
            wants = [Want(name_of(b), memoryview(bytearray(b.payload.nbytes))) for b in some]
            for got in store.get(wants, TIMEOUT):
                assert got.header is not None or got.index >= found.lead  # held by the lease
                if got.header is not None:
                    assert got.header == some[got.index].header
                    assert wants[got.index].buffer == some[got.index].payload
                    verify_payload(decode(got.header), wants[got.index].buffer, got.summed)
                    self.taken[number] += 1
            store.release([] if found.lease is None else [found.lease], TIMEOUT)

        return get_some


def soak(seconds: float, seed: int | None = None, flags: Sequence[str] = ()) -> Report:
    """One run on a fresh store of 6 MiB."""
    process, url = start_service(
        "--budget=6MiB", "--ticket-life=5", "--max-block=2MiB", "--log-level=error", *flags
    )
    address, run = url.removeprefix("kvrelay://"), Soak()
    stores = [RemoteStore(address, TRANSPORTS[n % 3]) for n in range(READERS + WRITERS)]
    try:
        jobs = [run.reader(number, stores[number]) for number in range(READERS)]
        jobs += [run.writer(number, stores[READERS + number]) for number in range(WRITERS)]

        def enough() -> bool:
            stats = stores[0].stats(TIMEOUT)
            below = stats.disk is None or stats.disk.counters.read > 0
            return all(run.taken) and stats.counters.evicted > 0 and below

        at_once(seconds, seed, jobs, enough)
        breaks = sum(sum(store.breaks.values()) for store in stores)
        return Report(stores[0].stats(TIMEOUT), tuple(run.taken), sum(run.put), breaks)
    finally:
        for store in stores:
            store.close()
        stop(process)


def disk_flags(path: str) -> tuple[str, ...]:
    """A disk that does not hold all of the blocks either."""
    return (f"--disk={path}", "--disk-budget=12MiB")


def main(argv: list[str]) -> int:
    """Run, check, print."""
    config = load(SoakConfig, argv, "python -m tests.kvstore.soak", "The store under load.")
    with tempfile.TemporaryDirectory() as folder:
        report = soak(config.seconds, config.seed, disk_flags(folder) if config.disk else ())
    stats, disk = report.stats, report.stats.disk
    print(
        f"{sum(report.taken):,} blocks read and compared, {report.put:,} put, "
        f"{stats.counters.stored:,} stored, {stats.counters.evicted:,} evicted; "
        f"leases {stats.leases}, reservations {stats.reservations}, "
        f"transports failed {report.breaks}"
    )
    if disk is not None:
        done = disk.counters
        print(f"disk: {done.written:,} written, {done.read:,} read, {done.dropped:,} dropped")
    report.check()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
