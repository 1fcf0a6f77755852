"""A request that workers died of is refused for a while, in any form, and no other is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.security.identity import Tenant
from kvrelay.v1 import types_pb2
from router.generate.request import AcceptedRequest
from router.generate.retry import MAX_POISONS, PoisonList, PoisonRequest
from tests.router.fakes import Behaviour, answer, decode_worker, ids, running
from tests.router.rig import PROMPT, failing, request

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
