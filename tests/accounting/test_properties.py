"""Any life of any requests over pools larger than the exhaustive check can afford.

Hypothesis chooses the limits and every event, and shrinks what breaks. The chain runner refuses to
read a slot that does not hold just the KV it should; the audit runs after every event.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvrelay.engine.core.external import Query
from kvrelay.engine.core.foresight import NOTHING, Foreseen, entries_ahead
from kvrelay.engine.core.plan import EngineLimits, Plan
from kvrelay.engine.core.request import Order
from kvrelay.engine.core.usage import leg_tokens
from tests.accounting.bench import Bench
from tests.engine.fakes import answer

ANSWERS = st.one_of(st.none(), st.integers(-5, 60), st.just(10**9))
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=24)


class Life(RuleBasedStateMachine):
    """The events of one scheduler; things may also happen between a plan and its commit."""

    bench: Bench
    plan: Plan | None = None
    foreseen: Foreseen = NOTHING
    answers: tuple[int | None, ...] = ()
    wasted = 0

    @initialize(
        size=st.integers(1, 6),
        blocks=st.integers(2, 24),
        seqs=st.integers(1, 8),
        budget=st.integers(1, 30),
        headroom=st.integers(0, 3),
        cancels=st.sampled_from([1, 2, 3]),
    )
    def begin(
        self, size: int, blocks: int, seqs: int, budget: int, headroom: int, cancels: int
    ) -> None:
        bounds = EngineLimits(blocks, size, 200, seqs, budget, headroom)
        self.bench = Bench(
            bounds, self._lookup, cancels=lambda load: load.epoch % cancels == cancels - 1
        )

    def _lookup(self, query: Query) -> int | None:
        if not self.answers:
            return 0
        first, *rest = self.answers
        self.answers = tuple(rest)
        return first

    @rule(
        prompt=PROMPTS,
        new=st.integers(1, 30),
        made=st.integers(0, 5),
        ending=st.one_of(st.none(), st.integers(0, 5)),
        prefill_only=st.booleans(),
        save=st.booleans(),
        salt=st.integers(0, 1),
    )
    def submit(
        self,
        prompt: list[int],
        new: int,
        made: int,
        ending: int | None,
        prefill_only: bool,
        save: bool,
        salt: int,
    ) -> None:
        bounds, bench = self.bench.bounds, self.bench
        capacity = min(bounds.num_blocks * bounds.block_size, bounds.max_model_len)
        prompt = prompt[:capacity]
        new = min(new, capacity - len(prompt) + 1)
        made = min(made, new - 1)
        tokens = answer(prompt, new, salt)
        stops = frozenset() if ending is None or ending >= new else frozenset({tokens[ending]})
        order = Order(
            f"r{len(bench.requests)}",
            (*prompt, *tokens[:made]),
            len(prompt),
            new,
            stops,
            prefill_only,
            save,
        )
        bench.add(order, salt)

    @precondition(lambda self: self.plan is None)
    @rule(answers=st.lists(ANSWERS, max_size=8))
    def schedule(self, answers: list[int | None]) -> None:
        self.answers = tuple(answers)
        self.plan = self.bench.begin(self.foreseen)
        self.foreseen = NOTHING

    @precondition(lambda self: self.plan is not None)
    @rule()
    def commit(self) -> None:
        plan = self.plan
        self.plan = None
        assert plan is not None
        kept = [entry for entry in plan.entries if entry.request.residency is not None]
        sampled = iter(self.bench.sample(Plan(tuple(kept), (), (), ())))
        results = [next(sampled) if entry in kept else None for entry in plan.entries]
        committed = self.bench.scheduler.commit(plan, results)
        self.bench.saves += committed.saves

    @precondition(lambda self: self.plan is not None)
    @rule()
    def foresee(self) -> None:
        assert self.plan is not None
        self.foreseen = entries_ahead(self.plan, self.bench.bounds.block_size)

    @precondition(lambda self: self.plan is not None)
    @rule()
    def discard(self) -> None:
        assert self.bench.scheduler.discard() is self.plan
        self.plan = None
        self.foreseen = NOTHING

    @precondition(lambda self: self.bench.loads)
    @rule(place=st.integers(0, 7), valid=st.integers(-2, 70))
    def load_ends(self, place: int, valid: int) -> None:
        self.bench.end_load(self.bench.loads[place % len(self.bench.loads)], valid)

    @precondition(lambda self: self.bench.saves)
    @rule(place=st.integers(0, 7))
    def save_ends(self, place: int) -> None:
        self.bench.end_save(self.bench.saves[place % len(self.bench.saves)])

    @precondition(lambda self: self.bench.scheduler.requests)
    @rule(place=st.integers(0, 7))
    def abort(self, place: int) -> None:
        standing = list(self.bench.scheduler.requests)
        self.bench.scheduler.abort(standing[place % len(standing)])

    @precondition(lambda self: self.bench.requests)
    @rule(place=st.integers(0, 7), epoch=st.integers(0, 20), valid=st.integers(-1, 9))
    def stray(self, place: int, epoch: int, valid: int) -> None:
        """An event nobody asked for, of any epoch that is not under way."""
        scheduler = self.bench.scheduler
        request_id = self.bench.requests[place % len(self.bench.requests)].id
        late = scheduler.late_events
        if (request_id, epoch) not in scheduler.loads:
            assert scheduler.loaded(request_id, epoch, valid) is None
            assert scheduler.late_events == late + 1

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "bench"):
            self.bench.check()
            executed = sum(leg_tokens(request).executed for request in self.bench.requests)
            assert executed == self.bench.runner.executed_positions

    def teardown(self) -> None:
        """The fair end: everything outside ends, and every request has its answer."""
        if not hasattr(self, "bench"):
            return
        self.answers = ()
        if self.plan is not None:
            self.commit()
        self.bench.end_all()
        self._finish()

    def _finish(self) -> None:
        bench = self.bench
        for _ in range(5000):
            if not bench.scheduler.requests:
                break
            bench.step()
            bench.end_all()
        assert not bench.scheduler.requests
        assert not any(bench.scheduler.pool.references)
        for request in bench.requests:
            assert request.tokens == bench.answer(request)
            account = leg_tokens(request)
            assert min(account.computed, account.recomputed, account.failed) >= 0


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
