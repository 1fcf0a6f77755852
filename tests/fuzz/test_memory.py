"""The check of memory at the end of ``make fuzz``."""

from __future__ import annotations

from itertools import chain, repeat

from tests.fuzz.memory import FRAGMENTS_MIB, QUIET, Readings, allowed_mib, at_rest


async def test_memory_is_read_until_none_is_given_back() -> None:
    falling = [{"store": 90, "router": 50}] * QUIET + [{"store": 60, "router": 55}] * QUIET
    told = chain(falling, [{"store": 70, "router": 45}], repeat({"store": 75, "router": 60}))
    assert await at_rest(lambda: next(told), 0.0) == {"store": 60, "router": 45}


async def test_reading_ends_though_memory_is_given_back_for_ever() -> None:
    told = iter(range(10**6, 0, -1))
    assert (await at_rest(lambda: {"store": next(told)}, 0.0))["store"] < 10**6


def test_growth_in_the_second_half_alone_is_a_problem() -> None:
    start, half = {"store": 30, "router": 50}, {"store": 300, "router": 80}
    allowed = allowed_mib(0)
    assert allowed == FRAGMENTS_MIB
    assert not Readings(start, half, {"store": 300 + allowed, "router": 60}).problems(allowed)
    leaked = Readings(start, half, {"store": 300, "router": 81 + allowed})
    assert [one.split(":")[0] for one in leaked.problems(allowed)] == ["router"]
    assert leaked.table().splitlines()[-1].split() == ["router", "50", "80", str(81 + allowed)]
