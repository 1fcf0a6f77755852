"""An audit of a running engine whose books were broken on purpose: named, and the others served."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvrelay.connector.mock import MockEnd, Script
from kvrelay.engine.core.plan import EngineLimits
from kvrelay.engine.core.request import Order, Request
from kvrelay.engine.core.totals import Totals
from kvrelay.engine.engine import EngineOptions
from tests.accounting.served import Served
from tests.engine.fakes import answer

LIMITS = EngineLimits(
    num_blocks=8, block_size=4, max_model_len=32, max_num_seqs=4, max_num_batched_tokens=16
)
UNAUDITED = EngineOptions()  # as in production: the audit is asked for
BLOCK = 7
ORDER = Order("nobody's", (1, 2, 3), 3, 8)


def test_a_broken_book_is_named_and_the_worker_goes_on() -> None:
    served = Served(LIMITS, Script(), options=UNAUDITED)
    pool = served.engine._scheduler.pool

    def forget_a_holder() -> None:
        pool.references[BLOCK] += 1
        pool.free.pop(BLOCK)

    with served:
        assert served.engine.audit().result(10) == []
        served.engine._call(forget_a_holder).result(10)
        (finding,) = served.engine.audit().result(10)
        assert finding.invariant == "I1"
        assert f"block {BLOCK} has 1 references and 0 holders" in finding.message
        for name, prompt in (("a", [1, 2, 3]), ("b", [1, 2, 3, 4, 5, 6])):
            served.submit(name, prompt, 8)
            served.wait(name)
            assert served.tokens(name) == answer(prompt, 8)
        assert len(served.engine.audit().result(10)) == 1


def stuck(on_fatal: Callable[[], None]) -> Served:
    """Its request ``stuck`` waits for a load that never ends."""
    bounds = replace(LIMITS, num_blocks=16)
    return Served(
        bounds,
        Script(lookups={"stuck": [4]}, loads={"stuck": [MockEnd(times=0)]}),
        options=EngineOptions(on_fatal=on_fatal),
    )


def until_it_loads(served: Served) -> None:
    for _ in range(100_000):
        if served.engine.load().loading:
            return
        served.engine.audit().result(10)
    raise AssertionError("no load began")


def test_a_request_whose_book_is_broken_ends_and_the_worker_goes_on() -> None:
    """A reference too few: giving the block back fails, once, and not for ever after."""
    lost = threading.Event()
    served = stuck(lost.set)
    scheduler = served.engine._scheduler

    def lose_a_holder() -> None:
        request = scheduler.requests["stuck"]
        scheduler.pool.references[request.resident.blocks[-1]] = 0

    with served:
        served.submit("stuck", range(9), 8)
        until_it_loads(served)
        served.engine._call(lose_a_holder).result(10)
        findings = served.engine.audit().result(10)
        assert "request stuck" in findings[0].message
        served.engine.abort("stuck")
        for name in ("a", "b"):
            served.submit(name, [1, 2, 3], 8)
            served.wait(name)
            assert served.tokens(name) == answer([1, 2, 3], 8)
        assert not lost.is_set()


def test_a_worker_that_could_only_fail_is_given_up() -> None:
    """Who stands in a queue and is not there any more would fail every step from now on."""
    lost = threading.Event()
    served = stuck(lost.set)
    scheduler = served.engine._scheduler
    with served:
        served.submit("stuck", range(9), 8)
        until_it_loads(served)
        served.engine._call(lambda: scheduler.running.append(Request.of(ORDER))).result(10)
        assert lost.wait(30)
        served.wait("stuck")


def found_in_totals(change: Callable[[Totals], Totals]) -> str:
    """What the audit says, as I9, of the totals of an engine that served a request."""
    served = Served(LIMITS, Script(lookups={"*": [4]}), options=UNAUDITED)
    legs = served.engine._legs

    def spoil() -> None:
        legs.totals = change(legs.totals)

    with served:
        served.submit("a", [1, 2, 3, 4, 5, 6], 2)
        served.wait("a")
        assert served.engine.audit().result(10) == []
        served.engine._call(spoil).result(10)
        (finding,) = served.engine.audit().result(10)
        assert finding.invariant == "I9"
        return finding.message


@pytest.mark.parametrize("field", ["local", "external", "prompt", "sources"])
def test_sums_by_source_that_do_not_add_up_are_named(field: str) -> None:
    def lose_count(totals: Totals) -> Totals:
        wrong = {"sources": {}, "prompt": 0}.get(field, totals.prompt + 1)
        return replace(totals, **{field: wrong})  # type: ignore[arg-type]

    assert "Totals(prompt=" in found_in_totals(lose_count)


@pytest.mark.parametrize("field", ["generated", "recomputed", "failed", "preemptions"])
def test_totals_that_are_not_the_sums_of_the_accounts_are_named(field: str) -> None:
    def count_once_more(totals: Totals) -> Totals:
        more: int = getattr(totals, field) + 1
        return replace(totals, **{field: more})  # type: ignore[arg-type]

    assert found_in_totals(count_once_more).startswith(f"{field} is ")
