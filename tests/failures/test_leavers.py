"""Clients that disconnect at any stage: nothing is held for them a second later."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvrelay import AsyncClient
from tests.exact.idle import check_idle
from tests.failures.rig import Rig
from tests.failures.streams import Query, draw

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]
STREAMS = 1000
AT_ONCE = 50
FREE_WITHIN = 1.0


async def _open_and_drop(client: AsyncClient, query: Query, tokens: int, seconds: float) -> None:
    """Leave after so many tokens, or after so many seconds, whichever is first."""
    async with client.generate(timeout=60.0, **query.parameters) as stream:
        try:
            async with asyncio.timeout(seconds):
                while tokens > 0:
                    tokens -= len((await anext(stream)).token_ids)
        except (TimeoutError, StopAsyncIteration):
            return


async def _storm(address: str, chance: random.Random) -> None:
    room = asyncio.Semaphore(AT_ONCE)
    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        for query in draw(chance, STREAMS, 120, 60):

            async def one(query: Query = query) -> None:
                async with room:
                    tokens = chance.choice([0, 1, 1, 2, 20])
                    await _open_and_drop(client, query, tokens, chance.expovariate(10.0))

            group.create_task(one())


def test_a_thousand_streams_opened_and_dropped(stand: Rig) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    asyncio.run(_storm(stand.cluster.router, random.Random(seed)))
    waited = check_idle(stand.cluster, FREE_WITHIN)
    print(f"LEAVERS {STREAMS} streams dropped, idle after {waited:.2f} s")
    view = stand.cluster.wait()
    assert [worker.in_flight for worker in view.workers] == [0] * 4
