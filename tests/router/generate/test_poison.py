"""A request that workers died of is refused for a while, in any form, and no other is."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.security.identity import Tenant
from kvrelay.v1 import types_pb2
from router.generate.request import AcceptedRequest
from router.generate.retry import MAX_POISONS, PoisonList, PoisonRequest
from tests.router.fakes import (
    Behaviour,
    FakeWorker,
    answer,
    decode_worker,
    ids,
    prefill_worker,
    running,
)
from tests.router.rig import PROMPT, failing, join, request

ASKED = AcceptedRequest(
    "a", (6, 6, 6), (), 8, types_pb2.Sampling(seed=1, top_k=3), Deadline.after(60)
)


def test_however_it_is_asked_again() -> None:
    poisons = PoisonList(60.0)
    poisons.check(ASKED, 0.0)
    poisons.add(ASKED, 10.0)
    other_seed = types_pb2.Sampling(seed=2, top_k=3)
    for again in (ASKED, replace(ASKED, id="b", outputs=(1, 2), sampling=other_seed)):
        with pytest.raises(PoisonRequest, match=r"died .* 20 s ago: it is refused for 40 s more"):
            poisons.check(again, 30.0)
    for another in (
        replace(ASKED, prompt=(6, 6)),
        replace(ASKED, sampling=types_pb2.Sampling(seed=1, top_k=4)),
        replace(ASKED, tenant=Tenant("t")),
    ):
        poisons.check(another, 30.0)
    poisons.check(ASKED, 70.0)


def test_so_many_are_remembered_and_no_more() -> None:
    poisons = PoisonList(60.0)
    for token in range(MAX_POISONS + 1):
        poisons.add(replace(ASKED, prompt=(token,)), 0.0)
    poisons.check(replace(ASKED, prompt=(0,)), 1.0)
    for token in (1, MAX_POISONS):
        with pytest.raises(PoisonRequest):
            poisons.check(replace(ASKED, prompt=(token,)), 1.0)


async def test_it_kills_no_more_workers_when_asked_again() -> None:
    workers = [decode_worker(f"d{i}", behaviour=Behaviour(die_after=0)) for i in range(4)]
    async with running(workers) as router:
        assert "2 workers died" in str(await failing(router.generate(request())))
        for seed in range(3):
            error = await failing(router.generate(request(seed=seed)))
            assert "workers died while they served this request" in str(error)
        assert sum(len(worker.legs) for worker in workers) == 2
        for worker in workers:
            worker.behaviour.die_after = None
        another = await router.generate(request(temperature=0.5))
        assert ids(another) == answer(PROMPT, 8, 5)


@pytest.mark.parametrize("tokens", [0, 1, 20])
@pytest.mark.parametrize("dying", [0.0, 0.4])
async def test_all_samples_of_a_request_kill_no_more_workers_than_one(
    tokens: int, dying: float
) -> None:
    """Its prompt is computed elsewhere; then six samples run, and each kills its decode worker."""
    behaves = Behaviour(die_after=tokens, dying=dying)
    workers = [decode_worker(f"d{i}", behaviour=replace(behaves)) for i in range(6)]
    async with running(
        [prefill_worker(), *workers], health_interval=0.05, health_timeout=0.15
    ) as router:
        asked = request(64)
        asked.n = 6
        assert "2 workers died" in str(await failing(router.generate(asked, 30)))
        assert sum(bool(worker.legs) for worker in workers) == 2
        error = await failing(router.generate(request(64, seed=9)))
        assert "workers died while they served this request" in str(error)
        assert sum(bool(worker.legs) for worker in workers) == 2


@pytest.mark.parametrize("after", [3, 160])
async def test_samples_continue_after_one_death(after: int) -> None:
    """Also after a late one, of which a sample that has just begun there may be the cause."""
    workers = [decode_worker(f"d{i}", max_num_seqs=2) for i in range(4)]
    workers[0].behaviour.die_after = after
    async with running([prefill_worker(), *workers]) as router:
        asked = request(200)
        asked.n = 7
        responses = await router.generate(asked, 30)
        for index in range(7):
            tokens = [t.id for r in responses if r.index == index for t in r.tokens]
            assert tokens == answer(PROMPT, 200, 5 + index)
        used = [worker for worker in workers if worker.legs]
        assert len(used) >= 2


def slowly_dying(count: int) -> list[FakeWorker]:
    """Workers that a leg kills: each is suspect for some time before its connection breaks."""
    behaves = Behaviour(die_after=0, dying=0.8)
    return [decode_worker(f"d{i}", behaviour=replace(behaves)) for i in range(count)]


async def test_a_worker_that_falls_silent_and_then_dies_is_a_death() -> None:
    workers = slowly_dying(4)
    async with running(workers, health_interval=0.05, health_timeout=0.15) as router:
        assert "2 workers died" in str(await failing(router.generate(request())))
        error = await failing(router.generate(request(seed=6)))
        assert "workers died while they served this request" in str(error)
        assert sum(len(worker.legs) for worker in workers) == 2
        await router.settled(used=2)


async def test_a_death_found_while_the_request_waits_for_a_worker_counts() -> None:
    """Its first worker comes back as another process: that is when the death is known."""
    silent, dying = decode_worker("d0"), decode_worker("d1")
    silent.behaviour = Behaviour(checks=(checks := asyncio.Event()), tokens=asyncio.Event())
    checks.set()
    dying.behaviour = Behaviour(die_after=0)
    async with running(
        [silent], health_interval=0.05, health_timeout=0.15, unreachable_after=0.5, worker_wait=10.0
    ) as router:
        call = asyncio.ensure_future(router.generate(request()))
        await asyncio.wait_for(silent.entered.wait(), 5)
        checks.clear()
        await router.settled(used=0)
        await join(router, silent, dying)
        await asyncio.wait_for(dying.entered.wait(), 5)
        await asyncio.sleep(1.0)  # the request has waited for the silent worker long enough
        silent.boot = "d0-again"
        silent.behaviour = Behaviour()
        checks.set()
        assert "2 workers died" in str(await failing(call))
        assert [len(worker.legs) for worker in (silent, dying)] == [1, 1]


async def test_silent_workers_that_answer_again_are_no_deaths_though_they_die_later() -> None:
    workers = [decode_worker(f"d{i}") for i in range(4)]
    answers = {worker.boot: asyncio.Event() for worker in workers}
    for worker in workers:
        answers[worker.boot].set()
        worker.behaviour = Behaviour(checks=answers[worker.boot], tokens=asyncio.Event())
    async with running(workers, health_interval=0.05, health_timeout=0.35) as router:
        call = asyncio.ensure_future(router.generate(request()))
        left = list(workers)
        for _ in range(3):
            worker = await entered(left)
            left.remove(worker)
            answers[worker.boot].clear()
            await asyncio.wait_for(worker.cancelled.wait(), 5)
            answers[worker.boot].set()
            await router.settled(used=len(left) + 1)
            await worker.stop()
            await router.settled(used=len(left))
        await entered(left)
        left[0].behaviour.tokens.set()  # type: ignore[union-attr]
        assert ids(await call) == answer(PROMPT, 8, 5)
        assert all(len(worker.legs) == 1 for worker in workers)


async def entered(workers: list[FakeWorker]) -> FakeWorker:
    """The first of the workers that gets a leg."""
    async with asyncio.timeout(5):
        while not any(worker.legs for worker in workers):  # noqa: ASYNC110 - one of several events
            await asyncio.sleep(0.01)
    return next(worker for worker in workers if worker.legs)
