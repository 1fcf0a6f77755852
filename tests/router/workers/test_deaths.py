"""What the router remembers of workers that died: which, when, and their last answer."""

from __future__ import annotations

import asyncio

from kvrelay.errors import DeadlineExceeded, Unavailable
from kvrelay.v1 import types_pb2
from router.workers.deaths import MAX_DEATHS, Deaths
from router.workers.health import READY, HealthState, WorkerHealth
from tests.router.fakes import decode_worker, running


def test_a_death_is_noted_once_and_an_answer_disproves_it() -> None:
    deaths = Deaths()
    deaths.note("a", 1.0, 2.0)
    deaths.note("a", 1.5, 3.0)
    assert (deaths.found, deaths.answered) == ({"a": 2.0}, {"a": 1.0})
    deaths.disprove("a")
    deaths.disprove("b")
    assert deaths.found == deaths.answered == {}


def test_so_many_are_remembered_and_no_more() -> None:
    deaths = Deaths()
    for number in range(MAX_DEATHS + 2):
        deaths.note(f"w{number}", 0.0, float(number))
    assert list(deaths.found) == [f"w{number}" for number in range(2, MAX_DEATHS + 2)]


def test_only_a_broken_connection_is_a_death() -> None:
    refused, silent = Unavailable("nothing listens"), DeadlineExceeded("it was silent for 10 s")
    assert WorkerHealth(HealthState.UNREACHABLE, refused).dead
    assert not WorkerHealth(HealthState.UNREACHABLE, silent).dead
    assert not WorkerHealth(HealthState.SUSPECT, refused).dead
    assert not READY.dead


async def test_a_restart_and_a_refused_connection_are_deaths_and_a_change_of_role_is_none() -> None:
    restarted, stopped, changed = (decode_worker(f"d{i}") for i in range(3))
    async with running([restarted, stopped, changed], health_interval=0.05) as router:
        begun = router.registry.answered["d0"]
        assert router.registry.died == {}
        restarted.boot = "d0-again"
        changed.boot = "d2-again"
        changed.role = types_pb2.ROLE_PREFILL
        await stopped.stop()
        async with asyncio.timeout(5):
            while set(router.registry.died) != {"d0", "d1"}:  # noqa: ASYNC110 - no event for it
                await asyncio.sleep(0.01)
            while not {"d0-again", "d2-again"} <= set(router.registry.answered):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert set(router.registry.died) == {"d0", "d1"}
        assert router.registry.answered["d0"] >= begun
