"""The sums of a worker, number by number: each event adds to what was there."""

from __future__ import annotations

import pytest

from kvrelay.engine.core.legs import Leg, Legs
from kvrelay.engine.core.plan import Committed, Output
from kvrelay.engine.core.request import Admission, Finish, Order, Request, Residency
from kvrelay.engine.core.totals import Totals
from kvrelay.sampling import Sampling
from kvrelay.usage import Miss, MissedBlocks

OUTPUT = Output(Request.of(Order("r", (1,), 1, 9)), 5, None)


def test_every_event_adds_to_what_was_there() -> None:
    totals = Totals()
    for _ in range(2):
        admission = Admission(1, 20, 4, 8)
        totals = totals.with_first_token(admission, {"a": 8}, MissedBlocks(Miss.EVICTED, 2))
        totals = totals.with_question(16)
    for _ in range(3):
        totals = totals.with_step(Committed((OUTPUT,) * 3, (), executed=15, recomputed=5))
        totals = totals.with_load(failed=2, late=4)
        totals = totals.with_preemptions(7)
    for how in (Finish.STOP, None, None):
        totals = totals.with_leg(how)
    assert (totals.prompt, totals.local, totals.external, totals.computed) == (40, 8, 16, 16)
    assert (totals.sources, totals.missed) == ({"a": 16}, {Miss.EVICTED: 4})
    assert (totals.generated, totals.recomputed, totals.executed) == (9, 15, 45)
    assert (totals.failed, totals.late, totals.preemptions) == (6, 12, 21)
    assert totals.asked == 32
    assert totals.finished == {"stop": 1, "handoff": 2}
    assert totals.adds_up


@pytest.mark.parametrize(("hits", "asked"), [((0, 8), [20, 20]), ((8, 0), [12, 20])])
def test_of_admissions_before_a_leg_runs_the_largest_question_counts(
    hits: tuple[int, int], asked: list[int]
) -> None:
    """A preemption gives up the load of the first one; the next finds more or less of its own."""
    legs, request = Legs(4), Request.of(Order("r", tuple(range(20)), 20, 1))
    leg = Leg(request, Sampling(), None, 0.0)
    legs.add(leg)
    seen: list[int] = []
    for epoch, local in enumerate(hits, 1):
        request.residency = Residency(Admission(epoch, 20, local, 4), [], local)
        legs.note_admission(leg, None, 0.0)
        seen.append(legs.totals.asked)
    assert seen == asked


def test_sums_that_cannot_be_do_not_add_up() -> None:
    assert not Totals(prompt=3, local=4).adds_up
    assert not Totals(prompt=9, external=4, sources={"a": 3}).adds_up
    assert not Totals(prompt=9, local=-1).adds_up
