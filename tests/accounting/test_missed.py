"""Why blocks were missed: in the account of a leg and in the totals, once, in the same words."""

from __future__ import annotations

from collections import Counter

import pytest

from kvrelay.connector.mock import MockConnector, MockEnd, Script
from kvrelay.engine.core.request import Admission, Order
from kvrelay.engine.core.usage import missed_blocks
from kvrelay.engine.engine import Engine
from kvrelay.sampling import Sampling
from kvrelay.usage import Miss, MissedBlocks
from tests.accounting.bench import limits
from tests.accounting.served import Served
from tests.engine.fakes import ChainRunner, naming

LENGTH, SIZE = 11, 4
"""Positions 0 to 9 can come from outside: 3 blocks, the last one partial."""


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
def test_every_block_is_here_or_outside_or_missed_or_computed_here_whatever_is_found(
    size: int,
) -> None:
    for length in range(1, 40):
        possible = range(0, length - 1, size)
        for hit in range(length):
            there = [first for first in possible if first < hit]
            missed = missed_blocks(Admission(1, length, 0, hit), size)
            assert len(there) + missed == len(possible)


@pytest.mark.parametrize(
    ("script", "missed"),
    [
        (Script(), MissedBlocks(Miss.NEVER_STORED, 3)),
        (Script(lookups={"*": [99]}), None),
        (Script(lookups={"*": [8]}, misses={"*": [Miss.EVICTED]}), MissedBlocks(Miss.EVICTED, 1)),
        (Script(lookups={"*": [-9]}, misses={"*": [Miss.EXPIRED]}), MissedBlocks(Miss.EXPIRED, 3)),
        (
            Script(lookups={"*": [99]}, loads={"*": [MockEnd(4, missed=Miss.FAILED_VERIFICATION)]}),
            MissedBlocks(Miss.FAILED_VERIFICATION, 2),
        ),
        (
            Script(
                lookups={"*": [8]},
                loads={"*": [MockEnd(0, times=3, missed=Miss.TOO_LATE)]},
                misses={"*": [Miss.EVICTED]},
            ),
            MissedBlocks(Miss.TOO_LATE, 3),
        ),
        (
            Script(
                lookups={"*": [None, None, 4]},
                loads={"*": [MockEnd(after=3)]},
                misses={"*": [Miss.OTHER_NAMESPACE]},
            ),
            MissedBlocks(Miss.OTHER_NAMESPACE, 2),
        ),
    ],
)
def test_a_leg_says_how_many_blocks_it_missed_and_why(
    script: Script, missed: MissedBlocks | None
) -> None:
    with Served(limits(12, SIZE), script) as served:
        served.submit("r", range(LENGTH), 6)
        served.wait("r")
        assert served.check("r").missed == missed
        total = served.engine.load().totals.missed
        assert total == ({} if missed is None else {missed.reason: missed.blocks})


def test_the_reason_is_that_of_the_first_admission() -> None:
    """Preempted in its prefill: what a later admission finds or misses is not counted."""
    script = Script(
        lookups={"long": [4, 8], "short": [0]},
        misses={"long": [Miss.EVICTED, Miss.EXPIRED], "short": [Miss.NEVER_STORED]},
    )
    served = Served(limits(12, SIZE, budget=4, headroom=0), script)
    served.submit("short", range(500, 515), 20)
    served.submit("long", range(29), 2)
    with served:
        served.wait("short", "long")
        ended = served.check("long")
        assert ended.preemptions == 1
        first, last = ended.tokens.runs
        assert (first.admission.local, first.admission.external) == (0, 4)
        assert (last.admission.local, last.admission.external) == (8, 8)
        assert (ended.tokens.local, ended.tokens.external) == (0, 4)
        assert ended.missed == MissedBlocks(Miss.EVICTED, 6)
        assert served.engine.load().totals.missed == {Miss.NEVER_STORED: 4, Miss.EVICTED: 6}


def test_the_totals_are_the_sum_of_the_legs_under_preemption_and_failure() -> None:
    ways: tuple[
        tuple[list[int | str | None], MockEnd, Miss], ...
    ] = (  # what a lookup says, how a load ends, why there was no more
        ([None, 0], MockEnd(), Miss.EVICTED),
        ([5], MockEnd(after=3), Miss.NEVER_STORED),
        ([99], MockEnd(3, missed=Miss.TOO_LATE), Miss.CLEARED),
        ([10**6], MockEnd(0, times=2, missed=Miss.FAILED_VERIFICATION), Miss.CLEARED),
        ([-3], MockEnd(), Miss.OTHER_NAMESPACE),
    )
    names = [f"r{number}" for number in range(30)]
    told = dict(zip(names, ways * 6, strict=True))
    script = Script(
        lookups={name: way[0] for name, way in told.items()},
        loads={name: [way[1]] for name, way in told.items()},
        misses={name: [way[2]] for name, way in told.items()},
    )
    served = Served(limits(12, SIZE, budget=16, headroom=0), script)
    for number, name in enumerate(names):  # before it starts: they compete for its pool
        served.submit(name, range(10 * number, 10 * number + 9), 30)
    with served:
        served.wait(*served.orders)
        legs = [served.check(request_id) for request_id in served.orders]
        served.settle()
        sums = Counter[Miss]()
        for leg in legs:
            if leg.missed is not None:
                sums[leg.missed.reason] += leg.missed.blocks
        assert sums == served.engine.load().totals.missed
        assert set(sums) >= {Miss.EVICTED, Miss.TOO_LATE, Miss.FAILED_VERIFICATION}
        assert sum(leg.preemptions for leg in legs) > 10


def test_tokens_that_come_after_their_request_has_left_are_counted_once() -> None:
    """Aborted while loading; the load ends later, and twice more. No lie counts, nor a stranger."""
    script = Script(
        lookups={"left": [8], "liar": [8], "short": [8]},
        loads={
            "left": [MockEnd(5, after=1, times=3, strays=(7,))],
            "liar": [MockEnd(10**6, after=1)],
            "short": [MockEnd(3, after=1)],
        },
    )
    bounds = limits(20, SIZE)
    runner = ChainRunner(bounds.num_blocks, SIZE)
    connector = MockConnector(script, fill=runner.fill)
    engine = Engine(runner, bounds, naming(), connector, lambda updates: None)
    for name in ("left", "liar", "short"):
        engine.submit(Order(name, tuple(range(LENGTH)), LENGTH, 6), Sampling())
    engine.turn()
    assert engine.load().loading == 3
    engine.abort("left")
    engine.abort("liar")
    assert engine.load().totals.late == 0
    while engine.load().loading or engine.load().running:
        engine.turn()
    load = engine.load()
    assert load.totals.late == 5 + 8
    assert load.late_events == 3 + 1 + 1
    assert (load.totals.external, load.totals.failed) == (3, 5)
    findings = engine.audit()
    engine.turn()
    assert findings.result() == []
