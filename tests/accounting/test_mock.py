"""The scripted connector does what its script says, alone and around another one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.connector.mock import MockConnector, MockEnd, Script
from kvrelay.engine.core.external import BlockContent, Load, Loaded, Query, Save, Saved
from kvrelay.usage import Miss

LOAD = Load("r", 5, 4, 10, tuple(range(16)), (b"a", b"b"), (1, 2, 3))
SAVE = Save("r", 5, 1, (BlockContent(0, b"a", b"", (1, 2)), BlockContent(1, b"b", b"a", (3, 4))))


def ask(connector: MockConnector, request_id: str, times: int) -> list[int | None]:
    return [connector.lookup(Query(request_id, [1], [b"a"], 0)) for _ in range(times)]


def test_lookups_follow_their_lines_and_the_last_one_stays() -> None:
    script = Script(lookups={"r": [None, None, 7, -3], "*": [99]})
    connector = MockConnector(script)
    assert ask(connector, "r", 6) == [None, None, 7, -3, -3, -3]
    assert ask(connector, "other", 2) == [99, 99]
    assert [query.request_id for query in connector.queries] == ["r"] * 6 + ["other"] * 2


def test_without_a_script_nothing_is_there_and_everything_succeeds() -> None:
    connector = MockConnector()
    assert ask(connector, "r", 1) == [0]
    connector.load(LOAD)
    connector.save(SAVE)
    assert connector.poll() == [Loaded("r", 5, 10), Saved("r", 5, 1, 2)]
    assert connector.poll() == []


def test_each_request_has_its_own_place_in_the_lines_for_all() -> None:
    connector = MockConnector(Script(lookups={"*": [1, 2]}))
    assert [ask(connector, name, 1) for name in "abab"] == [[1], [1], [2], [2]]


def test_events_come_after_so_many_polls() -> None:
    connector = MockConnector(Script(loads={"r": [MockEnd(after=2)]}))
    told: list[str] = []
    connector.start(lambda: told.append("news"))
    connector.load(LOAD)
    assert [len(connector.poll()) for _ in range(4)] == [0, 0, 1, 0]
    assert len(told) == 3, "as long as something is due, it asks to be polled"


@pytest.mark.parametrize("amount", [-5, 0, 3, 10, 10**9])
def test_a_load_claims_any_amount_and_writes_what_is_real(amount: int) -> None:
    written: list[int] = []
    connector = MockConnector(
        Script(loads={"r": [MockEnd(amount)]}), fill=lambda load, valid: written.append(valid)
    )
    connector.load(LOAD)
    assert not written, "the bytes come as late as the event"
    short = Miss.UNKNOWN if amount < 10 else None
    assert connector.poll() == [Loaded("r", 5, amount, short)]
    assert written == [min(max(amount, 0), 10)]


def test_events_are_repeated_and_written_once() -> None:
    written: list[int] = []
    script = Script(loads={"r": [MockEnd(times=3), MockEnd(times=0)]})
    connector = MockConnector(script, fill=lambda load, valid: written.append(valid))
    connector.load(LOAD)
    assert connector.poll() == [Loaded("r", 5, 10)] * 3
    assert written == [10]
    connector.load(replace(LOAD, epoch=6))
    assert connector.poll() == []


def test_strays_come_first_and_are_of_other_epochs() -> None:
    connector = MockConnector(Script(saves={"r": [MockEnd(amount=1, strays=(-1, 4))]}))
    connector.save(SAVE)
    assert connector.poll() == [
        Saved("r", 4, 1, 1),
        Saved("r", 9, 1, 1),
        Saved("r", 5, 1, 1),
    ]


def test_events_of_one_poll_come_in_reverse() -> None:
    connector = MockConnector(Script(reverse=True))
    connector.load(LOAD)
    connector.save(SAVE)
    assert [type(event) for event in connector.poll()] == [Saved, Loaded]


def test_around_another_connector_it_never_claims_more_than_is_there() -> None:
    inner = MockConnector(Script(lookups={"*": [8]}, loads={"*": [MockEnd(6)]}))
    outer = MockConnector(
        Script(lookups={"*": [None, "ask", 3]}, loads={"*": [MockEnd(99, times=2), MockEnd(2)]}),
        inner,
    )
    assert ask(outer, "r", 3) == [None, 8, 3]
    outer.load(LOAD)
    assert outer.poll() == [Loaded("r", 5, 6, Miss.UNKNOWN)] * 2
    outer.load(replace(LOAD, epoch=6))
    outer.save(SAVE)
    outer.release("r")
    assert outer.poll() == [Loaded("r", 6, 2, Miss.UNKNOWN), Saved("r", 5, 1, 2)]
    assert (list(inner.released), list(outer.released)) == (["r"], ["r"])
    assert inner.loads == outer.loads


def test_a_load_that_was_cancelled_writes_nothing() -> None:
    written: list[int] = []
    connector = MockConnector(
        Script(loads={"r": [MockEnd(after=1), MockEnd(after=1, cancels=False)]}),
        fill=lambda load, valid: written.append(load.epoch),
    )
    for epoch in (5, 6):
        connector.load(replace(LOAD, epoch=epoch))
    assert [connector.cancel("r", epoch) for epoch in (5, 6, 7)] == [True, False, True]
    events = [*connector.poll(), *connector.poll()]
    assert [event.epoch for event in events] == [5, 6], "both have their event"
    assert written == [6]
    assert connector.cancel("r", 6), "it has ended"


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False])
def test_around_another_connector_both_must_cancel(inner: bool, outer: bool) -> None:
    around = MockConnector(Script(loads={"r": [MockEnd(after=1, cancels=inner)]}))
    connector = MockConnector(Script(loads={"r": [MockEnd(cancels=outer)]}), around)
    connector.load(LOAD)
    assert connector.cancel("r", 5) is (inner and outer)
