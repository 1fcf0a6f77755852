"""Every state of the small cases; `make prove` explores the large ones."""

from __future__ import annotations

import pytest

from tests.accounting.case import Case
from tests.accounting.cases import CASES, SMALL
from tests.accounting.explore import Explorer
from tests.accounting.world import World, unpack

EVENTS = {"submit", "schedule", "commit", "discard", "loaded", "abort"}


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_every_state_of(case: Case) -> None:
    found = Explorer(case).run()
    print(found.line(), dict(found.events))
    assert found.closed
    assert found.states > 500
    assert set(found.events) >= EVENTS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_snapshot_restored_is_the_same_state(case: Case) -> None:
    explorer = Explorer(case, most=200)
    level = [(World(case).snapshot().pack(), b"")]
    for _ in range(4):
        for packed, _ in level:
            snapshot = unpack(packed)
            assert World.restore(case, snapshot).snapshot() == snapshot
        level = explorer.grow(level)


def test_a_path_can_be_told() -> None:
    """The report of a broken invariant names the events that lead to it."""
    explorer = Explorer(SMALL[0])
    first = [(World(SMALL[0]).snapshot().pack(), b"")]
    paths = [path for _, path in explorer.grow(explorer.grow(first))]
    told = [explorer.tell(path) for path in paths]
    assert [("submit", (0,)), ("abort", (0,))] in told
    assert any(event == ("schedule", (99,)) for path in told for event in path)
