"""The disk tier, with real processes: warm after a restart, and never a wrong byte."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvrelay.errors import KvrelayError
from kvstore import Block, Offer, PutStatus
from kvstore.base import NameQuery
from kvstore.client.admin import StoreAdmin
from kvstore.client.mirror import StoreMirror
from kvstore.client.remote import RemoteStore
from kvstore.client.transports.selector import TRANSPORTS
from kvstore.stats import DiskStats
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.disk.rig import size_of
from tests.kvstore.rig import TIMEOUT, get, make, name_of, offer, present, put

SLOW = 60.0


@contextmanager
def running(*flags: str) -> Iterator[tuple[RemoteStore, subprocess.Popen[str]]]:
    process, url = start_service("--log-level=error", *flags)
    store = RemoteStore(url.removeprefix("kvrelay://"))
    try:
        yield store, process
    finally:
        store.close()
        stop(process)


def disk_of(store: RemoteStore) -> DiskStats:
    stats = store.stats(TIMEOUT).disk
    assert stats is not None
    return stats


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SLOW
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def saved(store: RemoteStore) -> None:
    until(lambda: disk_of(store).unsaved == 0)


def terminate(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(SLOW) == 0


def fill(store: RemoteStore, blocks: list[Block]) -> None:
    """Slowly enough that each block is on disk before memory is short."""
    for start in range(0, len(blocks), 4):
        assert set(put(store, *blocks[start : start + 4])) <= {PutStatus.STORED}
        saved(store)


def flags(path: Path, budget: str = "1MiB", disk_budget: str = "64MiB") -> list[str]:
    return [f"--budget={budget}", f"--disk={path}", f"--disk-budget={disk_budget}"]


def test_what_does_not_fit_into_memory_comes_back_from_disk(tmp_path: Path) -> None:
    blocks = [make(50_000) for _ in range(60)]
    with running(*flags(tmp_path)) as (store, process):
        fill(store, blocks)
        assert store.stats(TIMEOUT).counters.evicted > 0
        assert disk_of(store).counters.skipped == 0
        assert all(present(store, *blocks))
        address = store.url.removeprefix("kvrelay://")
        for number, block in enumerate(blocks):
            reader = RemoteStore(address, TRANSPORTS[number % 3])
            assert get(reader, block)[0].header is not None
            reader.close()
        assert disk_of(store).counters.read > 0
        assert put(store, blocks[0]) == [PutStatus.EXISTED]
        found = store.lookup(NameQuery([name_of(b) for b in blocks[:8]], ttl=30), TIMEOUT)
        assert found.lead == 8
        assert found.sizes == tuple(block.size for block in blocks[:8])
        assert all(got.header is not None for got in get(store, *blocks[:8]))
        everything = store.lookup(NameQuery([name_of(b) for b in blocks], ttl=30), TIMEOUT)
        assert 8 <= everything.lead < 60  # no more than a lease can hold in memory
        seen = store.survey(NameQuery([name_of(b) for b in blocks]), TIMEOUT)
        assert seen.sizes == tuple(block.size for block in blocks)
        leases = [held.lease for held in (found, everything) if held.lease is not None]
        store.release(leases, TIMEOUT)
        assert store.stats(TIMEOUT).leases == 0
        terminate(process)


def test_a_restart_is_warm(tmp_path: Path) -> None:
    """Terminated, what is in memory only is written; killed, what had been written is there."""
    blocks = [make(20_000, count=300) for _ in range(40)]
    part = make(1000)
    with running(*flags(tmp_path, "4MiB")) as (store, process):
        put(store, *blocks[:30])
        assert store.put([Offer(name_of(part), part.size, True, lambda: part)], TIMEOUT)[0].present
        terminate(process)
    with running(*flags(tmp_path, "4MiB"), "--restore") as (store, process):
        assert all(present(store, *blocks[:30]))
        assert present(store, part) == [False]
        assert all(got.header is not None for got in get(store, *blocks[:30]))
        assert disk_of(store).counters.restored == 30
        put(store, *blocks[30:])
        saved(store)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with running(*flags(tmp_path, "4MiB"), "--restore") as (store, process):
        assert all(got.header is not None for got in get(store, *blocks))
        assert disk_of(store).counters.corrupt == 0
        terminate(process)
    with running(*flags(tmp_path)) as (store, process):  # without --restore: an empty store
        assert not any(present(store, *blocks))
        assert size_of(tmp_path) == 0
        terminate(process)


def test_killed_in_the_middle_of_writing_nothing_wrong_comes_back(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    source = random.Random(seed)
    blocks: list[Block] = []
    for turn in range(2):
        restore = ["--restore"] if turn else []
        new = [make(source.randrange(10, 300_000)) for _ in range(60)]
        blocks += new
        with running(*flags(tmp_path, "2MiB"), *restore) as (store, process):

            def write(store: RemoteStore = store, new: list[Block] = new) -> None:
                try:
                    while True:
                        for block in new:
                            store.put([offer(block)], TIMEOUT)
                except KvrelayError:
                    return

            writing = threading.Thread(target=write)
            writing.start()
            while disk_of(store).counters.written < 30:
                assert writing.is_alive()
            time.sleep(source.random() / 50)
            process.send_signal(signal.SIGKILL)
            process.wait()
            writing.join()
    with running(*flags(tmp_path, "2MiB"), "--restore") as (store, process):
        assert disk_of(store).counters.restored > 30
        came = [got.header is not None for b in blocks for got in get(store, b)]
        assert sum(came) >= disk_of(store).counters.restored
        assert disk_of(store).counters.corrupt == 0  # torn ones are not even found
        terminate(process)


def test_clear_reaches_the_disk(tmp_path: Path) -> None:
    blocks = [make(50_000) for _ in range(40)]
    with running(*flags(tmp_path)) as (store, process):
        fill(store, blocks)
        held = store.lookup(NameQuery([name_of(blocks[-1])], ttl=60), TIMEOUT)
        assert held.lease is not None
        assert store.clear(TIMEOUT) == 39
        assert present(store, *blocks) == [False] * 39 + [True]
        saved(store)  # what a lease held is saved again
        assert size_of(tmp_path) < 60_000
        process.send_signal(signal.SIGKILL)
        process.wait()
    with running(*flags(tmp_path), "--restore") as (store, _):
        assert present(store, *blocks) == [False] * 39 + [True]


def test_those_who_watch_know_of_the_disk(tmp_path: Path) -> None:
    blocks = [make(50_000) for _ in range(60)]
    with running(*flags(tmp_path, "1MiB", "2MiB")) as (store, _):
        admin, mirror = StoreAdmin(store.url.removeprefix("kvrelay://")), StoreMirror()
        fill(store, blocks)
        saved(store)
        for message in admin.watch(TIMEOUT):
            mirror.apply(message)
            if mirror.whole:
                break
        listed = {one.name: one for one in admin.list(TIMEOUT)}
        assert {name for _, name in mirror.blocks} == set(listed)
        assert set(listed) == {n for b in blocks if present(store, b)[0] for n in [name_of(b)]}
        below = [one for one in listed.values() if not one.memory]
        assert below
        assert all(one.disk for one in below)
        shown, header = admin.inspect(below[0].name, TIMEOUT)
        assert header.name == below[0].name
        assert (shown.memory, shown.disk) == (False, True)
        more = [make(50_000) for _ in range(20)]
        fill(store, more)
        for message in admin.watch(TIMEOUT, mirror.boot, mirror.sequence):
            mirror.apply(message)
            if {name for _, name in mirror.blocks} == {o.name for o in admin.list(TIMEOUT)}:
                break
        admin.close()


def test_a_store_that_cannot_have_its_directory_does_not_start(tmp_path: Path) -> None:
    with running(*flags(tmp_path)):
        command = [sys.executable, "-m", "kvstore", *flags(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SLOW, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "in use by another store" in done.stderr
