"""The engine over a store that does everything wrong: right tokens, clean books, nothing held."""

from __future__ import annotations

import random

import pytest

from kvrelay.connector.mock import MockEnd, Script
from kvrelay.engine.core.replay import replay
from kvrelay.engine.core.updates import Ended, Token
from tests.accounting.bench import limits
from tests.accounting.served import Served

LIES = [10**6, -5, 3, 0, 7, 1]
SCRIPTS = {
    "nothing there": Script(),
    "all there": Script(lookups={"*": [99]}),
    "lies in lookups": Script(lookups={"*": LIES}),
    "ask later": Script(lookups={"*": [None] * 6 + [8, None, 99]}),
    "slow loads": Script(lookups={"*": [99]}, loads={"*": [MockEnd(after=9), MockEnd(after=2)]}),
    "loads that cannot be cancelled": Script(
        lookups={"*": [99]},
        loads={"*": [MockEnd(after=9, cancels=False), MockEnd(after=2, cancels=False)]},
    ),
    "short loads": Script(lookups={"*": [99]}, loads={"*": [MockEnd(5), MockEnd(1)]}),
    "failed loads": Script(lookups={"*": [99]}, loads={"*": [MockEnd(0)]}),
    "lies in loads": Script(lookups={"*": [6]}, loads={"*": [MockEnd(-4), MockEnd(10**6)]}),
    "repeated": Script(
        lookups={"*": [9]}, loads={"*": [MockEnd(times=3)]}, saves={"*": [MockEnd(times=2)]}
    ),
    "out of order": Script(
        lookups={"*": [9]},
        loads={"*": [MockEnd(after=4), MockEnd()]},
        saves={"*": [MockEnd(after=5), MockEnd()]},
        reverse=True,
    ),
    "other epochs": Script(
        lookups={"*": [9]},
        loads={"*": [MockEnd(after=3, strays=(-1, 1, 1000))]},
        saves={"*": [MockEnd(strays=(-1, 5))]},
    ),
    "saves late and lost": Script(
        saves={"*": [MockEnd(after=30), MockEnd(0), MockEnd(-1), MockEnd(99, after=3)]}
    ),
}


@pytest.mark.parametrize("headroom", [0, 1])
@pytest.mark.parametrize("name", SCRIPTS)
def test_right_tokens_and_clean_books_whatever_the_store_does(name: str, headroom: int) -> None:
    bounds = limits(12, 4, budget=16, headroom=headroom)
    with Served(bounds, SCRIPTS[name]) as served:
        for number in range(12):
            shared = range(7 + number % 3)
            if number % 4 == 3:
                served.prefill(f"r{number}", shared)
            else:
                served.submit(f"r{number}", shared, 20, made=number % 2)
        served.wait(*served.orders)
        for request_id in served.orders:
            served.check(request_id)
        served.settle()
        assert served.executed() == served.runner.executed_positions
        assert {*served.connector.released} == {*served.orders}


def test_every_script_does_what_it_is_named_for() -> None:
    """The store was really asked, slow, short and wrong: no script passes by not being used."""
    failed, late, external = dict[str, int](), dict[str, int](), dict[str, int]()
    for name, script in SCRIPTS.items():
        with Served(limits(40, 4, budget=16), script) as served:
            for number in range(4):
                served.submit(f"r{number}", range(20 * number, 20 * number + 11), 6)
            served.wait(*served.orders)
            accounts = [served.check(request_id).tokens for request_id in served.orders]
            served.settle()
            failed[name] = sum(account.failed for account in accounts)
            external[name] = sum(account.external for account in accounts)
            late[name] = served.engine.load().late_events
    assert {name for name in SCRIPTS if failed[name]} == {
        "short loads",
        "failed loads",
        "lies in loads",
    }
    assert {name for name in SCRIPTS if late[name]} == {"repeated", "other epochs"}
    without = {"nothing there", "failed loads", "lies in loads", "saves late and lost"}
    assert {name for name in SCRIPTS if not external[name]} == without
    assert external["all there"] == 4 * 10
    assert external["ask later"] == 4 * 8


@pytest.mark.parametrize("seed", range(6))
def test_aborted_at_any_moment(seed: int) -> None:
    """Requests are ended from another thread while loads and saves are under way."""
    print(f"seed {seed}")
    dice = random.Random(seed)
    script = Script(
        lookups={"*": [dice.choice([None, 0, 5, 99]) for _ in range(50)]},
        loads={"*": [MockEnd(dice.choice([None, 3, 0]), dice.randint(0, 9)) for _ in range(20)]},
        saves={"*": [MockEnd(None, dice.randint(0, 5)) for _ in range(20)]},
    )
    with Served(limits(12, 4, budget=8, headroom=0), script) as served:
        kept = []
        for number in range(30):
            served.submit(f"r{number}", range(dice.randint(1, 9)), dice.randint(1, 20))
            if dice.random() < 0.5:
                served.engine.abort(f"r{dice.randint(0, number)}")
                served.engine.audit().result(30)
        served.submit("last", range(9), 9)
        kept = [name for name in served.orders if name in served.told or name == "last"]
        served.wait("last")
        served.check("last")
        for name in kept:
            if served.told[name] and isinstance(served.told[name][-1], Ended):
                served.check(name)
        for name in served.orders:
            served.engine.abort(name)
        served.settle()


def test_one_request_that_waits_for_ever_holds_up_nobody() -> None:
    script = Script(
        lookups={"stuck": [None], "lost": [99], "*": [0]}, loads={"lost": [MockEnd(times=0)]}
    )
    with Served(limits(20, 4, budget=16), script) as served:
        served.submit("stuck", range(9), 4)
        served.submit("lost", range(9), 4)
        for number in range(8):
            served.submit(f"r{number}", range(30 + number), 4)
        served.wait(*[f"r{number}" for number in range(8)])
        served.engine.abort("stuck")
        assert served.engine.audit().result(30) == []
        load = served.engine.load()
        assert (load.waiting, load.loading, load.running) == (0, 1, 0)
        assert load.held_blocks == 3, (
            "an unanswered load keeps its blocks, and nothing else is held"
        )


@pytest.mark.slow
def test_the_journal_of_a_real_run_with_a_hundred_preemptions_repeats() -> None:
    script = Script(
        lookups={"*": [None, 5, 99]},
        loads={"*": [MockEnd(3, after=2, times=2), MockEnd(after=1)]},
        saves={"*": [MockEnd(after=3)]},
    )
    journal: list[str] = []
    served = Served(limits(12, 4, budget=16, headroom=0), script, journal)
    for number in range(120):  # before it starts: they compete for its pool
        served.submit(f"r{number}", range(number % 5, number % 5 + 7), 30)
    with served:
        served.wait(*served.orders)
        for request_id in served.orders:
            served.check(request_id)
        served.settle()
    done = replay(journal)
    print(done)
    assert done.difference is None
    assert done.preemptions >= 100
    assert done.ended == 120


def test_the_tokens_of_a_long_answer_come_one_by_one_and_in_order() -> None:
    with Served(limits(40, 4, budget=4), Script(lookups={"*": [3]})) as served:
        served.submit("r", range(9), 100)
        served.wait("r")
        assert sum(isinstance(update, Token) for update in served.told["r"]) == 100
        assert served.check("r").tokens.external == 3
