"""What networks do, on the way to a worker and to the store: slow, cut, silent, wrong bytes.

Bits are flipped only on the way to the store, whose blocks carry checksums: without encryption a
token on its way to the client has no more than TCP's own (see docs/failures.md).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.exact.idle import check_idle
from tests.failures.proxy import Faults
from tests.failures.rig import HELD, ROLES, Observer, Rig, rig
from tests.failures.streams import Stream, draw, run_all, undisturbed

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(180)]
SAVES_SECONDS = 20.0  # a save over a broken way gives its blocks back at its deadline


@pytest.fixture(scope="module")
def linked(model: Path) -> Iterator[Rig]:
    """A cluster whose router reaches its workers through proxies too."""
    with rig(model, links=True, module=HELD) as made:
        yield made


def streams(count: int = 2, prompt: int = 200, tokens: int = 300) -> list[Stream]:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return [Stream(query) for query in draw(random.Random(seed), count, prompt, tokens)]


async def _fault_in_the_middle(stand: Rig, running: list[Stream], faults: Faults) -> float:
    """Faults on the way from a decode worker that serves a stream; its longest pause."""
    stand.gate.close()
    task = asyncio.ensure_future(run_all(stand.cluster.router, running))
    observer = Observer(stand)
    try:
        while not task.done():
            serving = [s for s in await observer.look() if s.role == "decode" and s.load.running]
            if serving and max(len(stream.tokens) for stream in running) > 10:
                stand.proxies[f"decode-{serving[0].index}"].down.faults = faults
                break
        assert not task.done(), "the streams were over too soon"
        stand.gate.open()
        moment = asyncio.get_running_loop().time()
        await task
        return max(stream.pause_after(moment) for stream in running)
    finally:
        stand.gate.open()
        await observer.close()


@pytest.mark.parametrize(
    "faults",
    [Faults(black_hole=True), Faults(cut_after=0), Faults(half_close_after=0)],
    ids=["black hole", "cut", "half-close"],
)
def test_the_way_to_a_decode_worker_fails(linked: Rig, faults: Faults) -> None:
    running = streams(tokens=700)
    pause = asyncio.run(_fault_in_the_middle(linked, running, faults))
    linked.heal()
    linked.settle()
    print(f"NETWORK {faults}: longest pause {pause:.3f} s")
    _check(linked, running)


@pytest.mark.parametrize("count", [1, 200, 3000])
def test_connections_that_break_again_and_again(linked: Rig, count: int) -> None:
    for index in range(2):
        linked.proxies[f"decode-{index}"].up.faults = Faults(delay=0.002, jitter=0.01)
    linked.proxies["prefill-0"].down.faults = Faults(cut_after=count)
    running = streams(count=6, tokens=40)
    asyncio.run(run_all(linked.cluster.router, running))
    linked.heal()
    linked.proxies["prefill-0"].cut()
    linked.settle()
    _check(linked, running)


@pytest.mark.parametrize(
    "faults",
    [
        Faults(flip_every=3000),
        Faults(delay=0.01, jitter=0.05),
        Faults(cut_after=20_000),
        Faults(half_close_after=20_000),
        Faults(rate=100_000),
        Faults(black_hole=True),
    ],
    ids=["flips", "jitter", "cut", "half-close", "slow", "black hole"],
)
@pytest.mark.parametrize("direction", ["up", "down"])
def test_the_way_to_the_store_fails(linked: Rig, faults: Faults, direction: str) -> None:
    for role in ROLES:
        way = linked.proxies[role].up if direction == "up" else linked.proxies[role].down
        way.faults = faults
    running = streams(count=4, tokens=40)
    asyncio.run(run_all(linked.cluster.router, running))
    linked.heal()
    _check(linked, running)


def _check(stand: Rig, running: list[Stream]) -> None:
    expected = undisturbed(stand.cluster.router, [stream.query for stream in running])
    assert [stream.tokens for stream in running] == expected
    for stream in running:
        stream.check_usage()
    check_idle(stand.cluster, SAVES_SECONDS)
