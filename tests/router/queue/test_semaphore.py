"""The weighted semaphore: bounded in all and for each tenant, fair, and exact after any order."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from kvrelay.errors import Exhausted
from kvrelay.rpc.security.identity import Tenant
from router.queue.semaphore import FairSemaphore

SECONDS = 20
LEFT = Exhausted("evicted", 1.0)


def tasks(
    semaphore: FairSemaphore, tenant: Tenant, units: int, count: int
) -> list[asyncio.Task[None]]:
    return [asyncio.ensure_future(semaphore.acquire(tenant, units)) for _ in range(count)]


def granted(waiting: list[asyncio.Task[None]]) -> int:
    return sum(task.done() and not task.cancelled() for task in waiting)


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_shares_and_the_limit() -> None:
    semaphore = FairSemaphore(10, 4)
    by_tenant = {name: tasks(semaphore, Tenant(name), 2, 4) for name in ("a", "b", "c")}
    await settle()
    assert [granted(waiting) for waiting in by_tenant.values()] == [2, 2, 1]  # 10 units
    semaphore.release(Tenant("a"), 2)
    await settle()
    assert sum(granted(waiting) for waiting in by_tenant.values()) == 6


async def test_the_unnamed_tenant_may_have_everything() -> None:
    semaphore = FairSemaphore(10, 4)
    await semaphore.acquire(Tenant("a"), 2)
    unnamed = tasks(semaphore, Tenant(), 1, 12)
    await settle()
    assert granted(unnamed) == 8
    semaphore.release(Tenant("a"), 2)
    await settle()
    assert granted(unnamed) == 10
    for task in unnamed:
        task.cancel()


async def test_tenants_wait_by_weight() -> None:
    semaphore = FairSemaphore(10, 10)
    await semaphore.acquire(Tenant("first"), 10)
    light = tasks(semaphore, Tenant("light", weight=1.0), 1, 10)
    heavy = tasks(semaphore, Tenant("heavy", weight=4.0), 1, 10)
    await settle()
    semaphore.release(Tenant("first"), 10)
    await settle()
    assert (granted(light), granted(heavy)) == (2, 8)
    for task in (*light, *heavy):
        task.cancel()


async def test_more_than_the_limit_is_given_alone() -> None:
    semaphore = FairSemaphore(10, 4)
    await semaphore.acquire(Tenant("a"), 1)
    (large,) = tasks(semaphore, Tenant("a"), 50, 1)
    small = tasks(semaphore, Tenant("b"), 1, 3)
    await settle()
    assert (large.done(), granted(small)) == (False, 3)  # "a" may have 4
    semaphore.release(Tenant("a"), 1)
    later = tasks(semaphore, Tenant("c"), 1, 1)
    await settle()
    assert (large.done(), granted(later)) == (False, 0)  # it is next, and nothing overtakes it
    semaphore.release(Tenant("b"), 3)
    await settle()
    assert large.done()
    semaphore.release(Tenant("a"), 50)
    await asyncio.wait_for(later[0], SECONDS)


async def test_the_newest_waiter_of_the_most_loaded_tenant_is_evicted() -> None:
    semaphore = FairSemaphore(100, 1)
    many, heavy, other = Tenant("many"), Tenant("heavy", weight=4.0), Tenant("other")
    waiting = [*tasks(semaphore, many, 1, 6), *tasks(semaphore, heavy, 1, 6)]
    await asyncio.sleep(0)
    assert semaphore.max_load == 5
    assert not semaphore.evict_for(many, lambda _: LEFT)  # it is the most loaded tenant itself
    assert semaphore.evict_for(heavy, lambda _: LEFT)
    assert semaphore.evict_for(other, lambda _: LEFT)
    with pytest.raises(Exhausted):
        await waiting[4]
    assert [n for n, task in enumerate(waiting) if task.done()] == [0, 4, 5, 6]
    assert not semaphore.evict_for(Tenant("light", weight=0.1), lambda _: LEFT)
    semaphore.release(many, 1)
    for task in waiting:
        task.cancel()  # the task that was just given a unit releases it
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.wait_for(semaphore.acquire(many, 1), SECONDS)
    assert semaphore.max_load == 0


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_is_lost_in_any_order(seed: int) -> None:
    """Random tasks that hold, leave, are cancelled or evicted; in the end everything is free."""
    chance = random.Random(seed)
    limit, share = 12, 5
    semaphore, held = FairSemaphore(limit, share), Counter[str]()

    async def one(tenant: Tenant) -> None:
        units = chance.randrange(1, 7)
        await asyncio.sleep(chance.random() / 500)
        await semaphore.acquire(tenant, units)
        held[tenant.name] += units
        try:
            assert held.total() <= max(limit, units)
            assert held[tenant.name] <= max(share, units)
            await asyncio.sleep(chance.random() / 500)
        finally:
            held[tenant.name] -= units
            semaphore.release(tenant, units)

    names = [Tenant(f"tenant {n}", weight=n) for n in range(1, 5)]
    running = [asyncio.ensure_future(one(chance.choice(names))) for _ in range(120)]
    while not all(task.done() for task in running):
        await asyncio.sleep(chance.random() / 1000)
        if chance.random() < 0.5:
            chance.choice(running).cancel()
        elif chance.random() < 0.5:
            semaphore.evict_for(chance.choice(names), lambda _: LEFT)
    results = await asyncio.gather(*running, return_exceptions=True)
    errors = [error for error in results if isinstance(error, BaseException)]
    assert all(isinstance(error, asyncio.CancelledError | Exhausted) for error in errors), errors
    assert len(errors) < len(results)
    assert (semaphore.waiting, held.total()) == (0, 0)
    await asyncio.wait_for(semaphore.acquire(names[0], limit), SECONDS)  # all units are free
