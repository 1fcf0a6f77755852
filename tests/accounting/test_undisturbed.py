"""What a request is told after a preemption is what an undisturbed run would have told it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from kvrelay.connector.mock import MockConnector, MockEnd, Script
from kvrelay.engine.core.audit import audit
from kvrelay.engine.core.plan import Plan
from kvrelay.engine.core.request import Admission, Order, Request, Run
from kvrelay.engine.core.updates import Admitted, Ended, Foresee, Sampled, Token, Update, Work
from kvrelay.engine.core.usage import computed_positions, leg_tokens
from kvrelay.engine.engine import Engine
from kvrelay.sampling import Sampling
from tests.accounting.bench import Bench, limits
from tests.accounting.served import AUDITED
from tests.engine.fakes import ChainRunner, answer, naming


class Counted:
    """How often each position of each request was executed, read off the plans."""

    def __init__(self, bench: Bench) -> None:
        self.times: dict[str, Counter[int]] = {}
        self._bench = bench

    def step(self) -> Plan:
        plan = self._bench.step()
        for entry in plan.entries:
            times = self.times.setdefault(entry.request.id, Counter())
            times.update(range(entry.start, entry.start + entry.count))
        return plan

    def run(self) -> None:
        while self._bench.scheduler.requests:
            self.step()
            self._bench.end_all()

    def check(self, request: Request) -> None:
        account, times = leg_tokens(request), self.times[request.id]
        assert account.executed == times.total()
        assert account.recomputed == times.total() - len(times)


def preempted_in_prefill(store: dict[str, int]) -> tuple[Bench, Counted, Request, Request]:
    """An older answer pushes a never-seen prompt of 28 tokens out in the middle of its prefill.

    ``store`` has how many tokens the store answers, by request id.
    """
    bench = Bench(limits(9, 4, budget=3, headroom=0), lambda query: store.get(query.request_id, 0))
    counted = Counted(bench)
    old = bench.submit("old", (1, 2, 3), 12)
    counted.step()
    new = bench.submit("new", range(50, 78), 2)
    while not bench.scheduler.preemptions:
        counted.step()
    assert 0 < new.runs[0].executed < 28, "preempted in the middle of its prefill"
    return bench, counted, old, new


def test_own_kv_found_in_the_pool_again_is_no_hit() -> None:
    bench, counted, old, new = preempted_in_prefill({})
    counted.run()
    bench.check_end()
    first, *_, last = new.runs
    assert first.admission.hit == 0 < last.admission.local, "it finds its own blocks again"
    account = leg_tokens(new)
    assert (account.local, account.external, account.computed) == (0, 0, 28)
    for request in (old, new):
        counted.check(request)
    assert account.recomputed == account.executed - 29


def test_own_kv_found_in_the_store_again_is_no_hit() -> None:
    store: dict[str, int] = {}
    bench, counted, _, new = preempted_in_prefill(store)
    store["new"] = 99
    counted.run()
    bench.check_end()
    assert new.runs[-1].admission.external > 0, "it loads what it saved"
    account = leg_tokens(new)
    assert (account.local, account.external, account.computed) == (0, 0, 28)
    counted.check(new)


def test_what_another_computed_after_the_first_admission_is_no_hit() -> None:
    """Preempted at 12 of 24 tokens; an equal prompt runs elsewhere; the store then has 20."""
    store: dict[str, int] = {}
    bench, counted, _, new = preempted_in_prefill(store)
    reached = new.runs[0].frontier
    store["new"] = 27 - 4 * (reached // 4)
    counted.run()
    bench.check_end()
    last = new.runs[-1].admission
    assert last.hit == 27 > reached
    account = leg_tokens(new)
    assert (account.local, account.external, account.computed) == (0, 0, 28)
    assert account.executed == reached + 2 < 29
    assert account.recomputed == 0
    counted.check(new)


def test_loaded_kv_that_is_lost_and_computed_is_not_computed_again() -> None:
    """The first admission loads 20 tokens; after the preemption the store has none of them."""
    store = {"new": 20}
    bench = Bench(limits(9, 4, budget=3, headroom=0), lambda query: store.get(query.request_id, 0))
    counted = Counted(bench)
    bench.submit("old", (1, 2, 3), 30)
    counted.step()
    new = bench.submit("new", range(50, 78), 2)
    counted.step()
    bench.end_all()
    while not bench.scheduler.preemptions:
        counted.step()
    store.clear()
    counted.run()
    bench.check_end()
    assert min(run.admission.hit for run in new.runs) < 20 == new.runs[0].admission.external
    account = leg_tokens(new)
    assert (account.local, account.external, account.computed) == (0, 20, 8)
    counted.check(new)


@pytest.mark.parametrize(
    ("spans", "start", "stop", "count"),
    [
        ([], 0, 9, 0),
        ([(2, 5)], 0, 9, 3),
        ([(2, 5), (5, 7)], 0, 9, 5),
        ([(2, 5), (3, 7)], 0, 9, 5),
        ([(4, 7), (0, 2)], 0, 9, 5),
        ([(3, 8), (0, 2), (1, 4)], 0, 9, 8),
        ([(0, 9), (2, 3)], 0, 9, 9),
        ([(0, 9)], 4, 6, 2),
        ([(0, 3), (7, 9)], 4, 6, 0),
        ([(0, 5), (5, 9)], 4, 6, 2),
        ([(3, 3)], 0, 9, 0),
    ],
)
def test_positions_are_counted_once(
    spans: list[tuple[int, int]], start: int, stop: int, count: int
) -> None:
    runs = [Run(Admission(1, 10, hit, 0), frontier) for hit, frontier in spans]
    assert computed_positions(runs, start, stop) == count


def test_the_store_is_not_asked_for_a_token_that_is_computed_here_anyway() -> None:
    """9 tokens in blocks of 4, 8 of them in the pool: the store has nothing to add."""
    bench = Bench(limits(12, 4), lambda query: None if query.request_id == "again" else 0)
    bench.submit("first", range(9), 3)
    bench.run()
    again = bench.submit("again", range(9), 3)
    bench.run()
    assert again.runs[0].admission.local == 8
    assert bench.queries == [("first", 0)]


# --- the engine -----------------------------------------------------------------------------------


class Watched(ChainRunner):
    """Notes, for every step, which requests were told of their admission before it ran."""

    def __init__(self, num_blocks: int, size: int) -> None:
        super().__init__(num_blocks, size)
        self.updates: list[tuple[str, Update]] = []
        self.told: list[set[str]] = []

    def deliver(self, updates: Sequence[tuple[str, Update]]) -> None:
        self.updates += updates

    def execute(self, works: Sequence[Work], foresee: Foresee = lambda: ()) -> list[Sampled | None]:
        self.told.append({name for name, update in self.updates if isinstance(update, Admitted)})
        return super().execute(works, foresee)

    def of(self, name: str) -> list[Update]:
        return [update for request_id, update in self.updates if request_id == name]


def engine(script: Script, blocks: int = 9, budget: int = 3) -> tuple[Engine, Watched]:
    """An engine without its thread: the test takes its turns."""
    bounds = limits(blocks, 4, budget=budget, headroom=0)
    runner = Watched(blocks, 4)
    connector = MockConnector(script, fill=runner.fill)
    return Engine(runner, bounds, naming(), connector, runner.deliver, AUDITED), runner


def submit(made: Engine, name: str, prompt: Sequence[int], new: int) -> None:
    made.submit(Order(name, tuple(prompt), len(prompt), new), Sampling())


def test_a_leg_tells_its_first_admission_once_before_its_first_positions_run() -> None:
    """Preempted in its prefill, it finds its own KV in pool and store: neither is told."""
    made, runner = engine(Script(lookups={"new": [4, 99], "old": [0]}))
    submit(made, "old", (1, 2, 3), 24)
    made.turn()
    submit(made, "new", range(50, 78), 2)
    while not any(isinstance(update, Ended) for update in runner.of("new")):
        made.turn()
    assert runner.told[0] == {"old"}, "told before the step was computed"
    updates = runner.of("new")
    first, *others, ended = updates
    assert isinstance(first, Admitted)
    assert isinstance(ended, Ended)
    assert ended.preemptions == 1
    assert len(ended.tokens.runs) == 2
    assert ended.tokens.runs[1].admission.hit > 4
    assert (first.admission.local, first.admission.external) == (0, 4)
    assert sum(first.sources.values()) == 4
    assert all(isinstance(update, Token) for update in others)
    assert (ended.tokens.local, ended.tokens.external, ended.tokens.computed) == (0, 4, 24)
    assert (ended.sources, ended.missed) == (first.sources, first.missed)
    totals = made.load().totals
    assert (totals.prompt, totals.local, totals.external) == (31, 0, 4)
    assert totals.recomputed == ended.tokens.recomputed


def test_an_admission_is_told_when_its_load_has_ended_with_what_was_verified() -> None:
    made, runner = engine(Script(lookups={"*": [12]}, loads={"*": [MockEnd(5, after=2)]}))
    submit(made, "r", range(20), 2)
    made.turn()
    assert runner.of("r") == []
    while not runner.of("r"):
        made.turn()
    first = runner.of("r")[0]
    assert isinstance(first, Admitted)
    assert (first.admission.local, first.admission.external) == (0, 5)
    assert first.missed is not None


def test_counters_move_in_the_step_of_the_event() -> None:
    """Not when the leg ends: a scrape in the middle of a leg sees all that has happened."""
    made, runner = engine(
        Script(lookups={"old": [0], "new": [8, 0]}, loads={"new": [MockEnd(3)]}), budget=4
    )
    submit(made, "old", (1, 2, 3), 30)
    made.turn()
    for generated in range(1, 5):
        assert made.load().totals.generated == generated
        made.turn()
    submit(made, "new", range(50, 74), 9)
    made.turn()
    totals = made.load().totals
    assert (totals.asked, totals.failed) == (3 + 24, 0)
    made.turn()
    assert made.load().totals.failed == 5, "its load has ended short"
    seen = made.load().totals
    while not runner.of("old") or not isinstance(runner.of("old")[-1], Ended):
        before = made.load().totals
        made.turn()
        seen = made.load().totals
        assert seen.generated - before.generated <= 2
        assert seen.executed == runner.executed_positions
    assert seen.preemptions > 0
    assert seen.generated == sum(isinstance(update, Token) for _, update in runner.updates)
    while made.load().running or made.load().waiting:
        before = made.load().totals
        made.turn()
    account = runner.of("new")[-1]
    assert isinstance(account, Ended)
    assert made.load().totals.recomputed == account.tokens.recomputed > 0
    assert made.load().totals.asked == 27, "a later admission asks nothing that counts"


def test_questions_count_without_an_end() -> None:
    """Aborted before its first token: the question was asked, the prompt was not processed."""
    made, runner = engine(Script(lookups={"*": [0]}))
    submit(made, "r", range(20), 2)
    made.turn()
    made.abort("r")
    made.turn()
    totals = made.load().totals
    assert (totals.asked, totals.prompt) == (20, 0)
    assert totals.executed == runner.executed_positions == 3


# --- the audit ------------------------------------------------------------------------------------


def test_the_audit_compares_the_account_with_every_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An account that calls a request's own KV a hit, or forgets a position, is found."""
    bench, counted, _, new = preempted_in_prefill({})
    while new.residency is None:
        bench.end_all()
        counted.step()
    assert audit(bench.scheduler) == []
    new.runs.append(new.runs[0])
    assert {("I6", "new")} == {(one.invariant, one.request_id) for one in audit(bench.scheduler)}
    new.runs.pop()
    told = leg_tokens(new)
    run = new.all_runs[-1].admission
    wrong = {
        "I6": lambda request: type(told)(
            told.length, run.local, run.external, 0, 0, told.recomputed, told.executed, 0, told.runs
        ),
        "I5": lambda request: type(told)(
            told.length, 0, 0, 0, 0, told.recomputed + 1, told.executed, 0, told.runs
        ),
    }
    for invariant, account in wrong.items():
        monkeypatch.setattr("kvrelay.engine.core.audit.leg_tokens", account)
        found = {one.invariant for one in audit(bench.scheduler) if one.request_id == "new"}
        assert found == {invariant}


def test_tokens_are_those_of_one_process() -> None:
    _, counted, old, new = preempted_in_prefill({})
    counted.run()
    assert old.tokens[3:] == answer((1, 2, 3), 12)
    assert new.tokens[28:] == answer(range(50, 78), 2)
