"""A request that kills its workers is refused after two deaths and logged; others are unharmed."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from kvrelay import AsyncClient
from kvrelay.errors import KvrelayError
from tests.exact.idle import check_idle
from tests.failures.poisoned import POISON, SLOW_POISON
from tests.failures.rig import ROLES, Rig, rig
from tests.failures.streams import Stream, draw, run_all, undisturbed

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]
DEATHS = 2  # the router's --max-deaths
Prompt: TypeAlias = tuple[int, ...]
SALTS = itertools.count()  # each makes another request: the router refuses one that killed


@pytest.fixture(scope="module")
def fleet(model: Path) -> Iterator[Rig]:
    """Workers that a poison kills."""
    with rig(model, module="tests.failures.poisoned") as made:
        yield made


def deaths(fleet: Rig) -> int:
    """Restarts of all workers."""
    cluster = fleet.cluster
    processes = [
        cluster.process(role, index)
        for role in ROLES
        for index in range(len(cluster.addresses(role)))
    ]
    return sum(process.starts - 1 for process in processes)


async def poison(fleet: Rig, first: Prompt, salt: int) -> KvrelayError:
    """Send a request that kills its worker. Returns the client's error."""
    async with AsyncClient(fleet.cluster.router) as client:
        try:
            await client.complete(token_ids=[*first, salt], max_tokens=8, timeout=100.0)
        except KvrelayError as error:
            return error
    raise AssertionError("the request was served")


async def together(
    fleet: Rig, streams: list[Stream], first: Prompt, count: int
) -> list[KvrelayError]:
    """Send ``count`` such requests, each twice, while ``streams`` run. Returns their errors."""
    running = asyncio.ensure_future(run_all(fleet.cluster.router, streams))
    errors = []
    for salt in itertools.islice(SALTS, count):
        while not all(stream.tokens for stream in streams):
            assert not running.done(), running.exception()
            await asyncio.sleep(0.01)
        errors.append(await poison(fleet, first, salt))
        assert "it is refused for" in str(await poison(fleet, first, salt))  # and no worker dies
        await asyncio.to_thread(fleet.settle)
    await running
    return errors


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("first", [POISON, SLOW_POISON], ids=["at once", "after a silence"])
def test_a_poisonous_request_kills_two_workers_and_no_more(
    fleet: Rig, first: Prompt, count: int
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    streams = [Stream(one) for one in draw(random.Random(seed), 4, 100, 400)]
    before = deaths(fleet)
    errors = asyncio.run(together(fleet, streams, first, count))
    assert all(f"{DEATHS} workers died while they served this request" in str(e) for e in errors)
    fleet.settle()
    assert deaths(fleet) - before == count * DEATHS
    reported = [line for line in fleet.lines if "ERROR" in line and "workers died" in line]
    assert len(reported) >= count
    expected = undisturbed(fleet.cluster.router, [stream.query for stream in streams])
    assert [stream.tokens for stream in streams] == expected
    for stream in streams:
        stream.check_usage()
    check_idle(fleet.cluster)
