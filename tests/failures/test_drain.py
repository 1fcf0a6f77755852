"""Workers drain: their streams move to others and no client sees an error."""

from __future__ import annotations

import asyncio
import random
import signal
import time

import grpc
import pytest

from kvrelay import AsyncClient
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from tests.exact.idle import check_idle
from tests.failures.rig import ROLES, Observer, Rig
from tests.failures.streams import Stream, draw, run_all, undisturbed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
AT_ONCE = 6
RETURN_SECONDS = 60.0
REACHED_SECONDS = 20.0  # in which a stream reaches a worker, if it is placed there
TRIES = 5


class Load:
    """Streams one after another until stopped; all tokens must be right."""

    def __init__(self, rig: Rig, seed: int) -> None:
        print(f"load: seed {seed}")
        self._rig = rig
        self._chance = random.Random(seed)
        self.done: list[Stream] = []
        self.stop = False

    async def run(self) -> None:
        """So many at once; raises the first error that a client sees."""
        async with AsyncClient(self._rig.cluster.router) as client, asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._one_after_another(client))

    async def _one_after_another(self, client: AsyncClient) -> None:
        while not self.stop:
            (query,) = draw(self._chance, 1, self._chance.randrange(20, 200), 100)
            stream = Stream(query)
            await stream.run(client, may_break=False)
            self.done.append(stream)

    def check(self) -> None:
        """Every stream has the tokens of an undisturbed run."""
        again = undisturbed(self._rig.cluster.router, [stream.query for stream in self.done])
        assert [stream.tokens for stream in self.done] == again
        for stream in self.done:
            stream.check_usage()


async def _restart(rig: Rig, observer: Observer, role: str, index: int) -> float:
    """SIGTERM one worker and wait until the one started after it serves; seconds."""
    begun, before = time.monotonic(), await _boot(observer, role, index)
    rig.cluster.kill(role, index, signal.SIGTERM)
    while time.monotonic() - begun < RETURN_SECONDS:
        now = await _boot(observer, role, index)
        if now is not None and now != before:
            return time.monotonic() - begun
        await asyncio.sleep(0.05)
    raise AssertionError(f"{role} {index} did not come back")


def _restart_store(rig: Rig) -> None:
    """SIGTERM the store: what it held is computed again."""
    process, deadline = rig.cluster.process("store"), time.monotonic() + RETURN_SECONDS
    starts = process.starts
    rig.cluster.kill("store", 0, signal.SIGTERM)
    while process.starts == starts:
        assert time.monotonic() < deadline, "the store did not come back"
        time.sleep(0.05)
    rig.settle()


async def _boot(observer: Observer, role: str, index: int) -> str | None:
    seen = await observer.look()
    return next((s.load.worker_id for s in seen if (s.role, s.index) == (role, index)), None)


async def _roll(rig: Rig, load: Load) -> list[float]:
    """Restart every worker and then the store, one after another, under load."""
    observer = Observer(rig)
    running = asyncio.ensure_future(load.run())
    try:
        took = []
        for role in ROLES:
            for index in range(len(rig.cluster.addresses(role))):
                took.append(await _restart(rig, observer, role, index))
                await asyncio.to_thread(rig.settle)
                assert not running.done(), running.exception()
        await asyncio.to_thread(_restart_store, rig)
        assert not running.done(), running.exception()
        load.stop = True
        await running
        return took
    finally:
        load.stop = True
        running.cancel()
        await observer.close()


@pytest.mark.slow
def test_a_rolling_restart_of_everything_but_the_router_loses_nothing(stand: Rig) -> None:
    load = Load(stand, random.randrange(1 << 32))
    took = asyncio.run(_roll(stand, load))
    print(f"ROLL {len(load.done)} streams, restarts {[round(one, 2) for one in took]} s")
    load.check()
    check_idle(stand.cluster)


def test_drain_moves_the_streams_away(stand: Rig) -> None:
    chance = random.Random(seed := random.randrange(1 << 32))
    print(f"seed {seed}")
    moved = False
    for _ in range(TRIES):  # the first decode worker may have got no stream
        streams = [Stream(query) for query in draw(chance, 2, 100, 800)]
        drained = asyncio.run(_drain(stand, streams))
        print(f"DRAIN answered after {drained:.2f} s")
        expected = undisturbed(stand.cluster.router, [stream.query for stream in streams])
        assert [stream.tokens for stream in streams] == expected
        moved = any(len(s.usage.legs) > 2 for s in streams if s.usage is not None)
        _replace(stand)
        check_idle(stand.cluster)
        if moved:
            break
    assert moved


async def _drain(rig: Rig, streams: list[Stream]) -> float:
    """Call ``Drain`` on the first decode worker as soon as it runs a stream; seconds it took.

    It stands still in the middle of the stream until the stream has left it.
    """
    rig.gate.close()
    running = asyncio.ensure_future(run_all(rig.cluster.router, streams))
    observer = Observer(rig)
    try:
        async with grpc.aio.insecure_channel(rig.cluster.addresses("decode")[0]) as channel:
            until = time.monotonic() + REACHED_SECONDS
            while not running.done() and time.monotonic() < until:
                seen = await observer.look()
                if any(s.load.running for s in seen if (s.role, s.index) == ("decode", 0)):
                    break
            begun = time.monotonic()
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            await stub.Drain(worker_pb2.DrainRequest(), timeout=30.0)
        drained = time.monotonic() - begun
        rig.gate.open()
        await running
        return drained
    finally:
        rig.gate.open()
        running.cancel()
        await observer.close()


def _replace(rig: Rig) -> None:
    """SIGTERM the worker that drains, for good, and wait for the one that takes its place."""
    process, deadline = rig.cluster.process("decode", 0), time.monotonic() + RETURN_SECONDS
    starts = process.starts
    rig.cluster.kill("decode", 0, signal.SIGTERM)
    while process.starts == starts:
        assert time.monotonic() < deadline, "the worker did not come back"
        time.sleep(0.05)
    rig.settle()
