"""A scheduler on a bench: a chain runner for a model, a scripted store, every invariant each step.

Loads and saves stand in ``loads`` and ``saves`` until a test ends them; ``run`` ends them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrelay.engine.core.audit import audit
from kvrelay.engine.core.blocks import Naming
from kvrelay.engine.core.external import Load, Query, Save
from kvrelay.engine.core.foresight import NOTHING, Foreseen
from kvrelay.engine.core.plan import EngineLimits, Plan
from kvrelay.engine.core.request import Finish, Order, Request, RequestState
from kvrelay.engine.core.scheduler import Cancel, Lookup, Scheduler
from kvrelay.engine.core.usage import leg_tokens
from tests.engine.fakes import VOCABULARY, ChainRunner, answer, naming

Answers = Callable[[Query], int | None]


def limits(
    num_blocks: int, block_size: int, *, seqs: int = 16, budget: int = 512, headroom: int = 1
) -> EngineLimits:
    return EngineLimits(num_blocks, block_size, 10_000, seqs, budget, headroom)


class Bench:
    """``valid`` says how a load ends: by default all of it was verified.

    ``cancels`` says which loads can be given up before they end: by default none.
    """

    def __init__(
        self,
        bounds: EngineLimits,
        answers: Answers = lambda _: 0,
        valid: Callable[[Load], int] = lambda load: load.external,
        make: Callable[[EngineLimits, Naming, Lookup, Cancel], Scheduler] = Scheduler,
        cancels: Callable[[Load], bool] = lambda _: False,
    ) -> None:
        self.bounds = bounds
        self.runner = ChainRunner(bounds.num_blocks, bounds.block_size)
        self.scheduler = make(bounds, naming(), self._lookup, self._cancel)
        self.queries: list[tuple[str, int]] = []
        self.started: list[Load] = []
        self.loads: list[Load] = []
        self.saves: list[Save] = []
        self.requests: list[Request] = []
        self.salts: dict[str, int] = {}
        self.steps = 0
        self._answers = answers
        self._valid = valid
        self._cancels = cancels

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        new: int,
        *,
        prefill_only: bool = False,
        salt: int = 0,
    ) -> Request:
        order = Order(request_id, tuple(prompt), len(prompt), new, prefill_only=prefill_only)
        return self.add(order, salt)

    def add(self, order: Order, salt: int = 0) -> Request:
        """A request; equal prompts of another ``salt`` have other answers, as with other seeds."""
        self.salts[order.request_id] = salt
        self.requests.append(self.scheduler.submit(order))
        return self.requests[-1]

    def resume(self, request_id: str, prompt: Sequence[int], made: int, new: int) -> Request:
        """A decode leg: the prompt and the first ``made`` tokens of its answer."""
        tokens = (*prompt, *answer(prompt, made))
        return self.add(Order(request_id, tokens, len(prompt), new))

    def step(self) -> Plan:
        """One step of the model."""
        plan = self.begin()
        self.finish(plan)
        return plan

    def begin(self, foreseen: Foreseen = NOTHING) -> Plan:
        """Plan a step; what is outside starts."""
        plan = self.scheduler.schedule(foreseen)
        assert sum(entry.count for entry in plan.entries) <= self.bounds.max_num_batched_tokens
        assert len(self.scheduler.running) + self.scheduler.loading <= self.bounds.max_num_seqs
        residents = [request for request in self.requests if request.residency is not None]
        for request in plan.preempted:
            assert all(other.arrival < request.arrival for other in residents), "a newer one stays"
        self.started += plan.loads
        self.loads += plan.loads
        self.saves += plan.saves
        self.check()
        return plan

    def finish(self, plan: Plan) -> None:
        """Run the model and commit."""
        committed = self.scheduler.commit(plan, self.sample(plan))
        self.saves += committed.saves
        self.steps += 1
        self.check()

    def sample(self, plan: Plan) -> list[int | None]:
        """Run the model; each request samples by its salt."""
        sampled = zip(plan.entries, self.runner.plan(plan), strict=True)
        return [
            None if token is None else (token + self.salts[entry.request.id]) % VOCABULARY
            for entry, token in sampled
        ]

    def answer(self, request: Request) -> list[int]:
        """The prompt and the tokens that one process would have made after it."""
        prompt = request.order.tokens[: request.order.prompt_len]
        return [*prompt, *answer(prompt, request.length - len(prompt), self.salts[request.id])]

    def end_load(self, load: Load, valid: int | None = None) -> None:
        valid = self._valid(load) if valid is None else valid
        self.loads.remove(load)
        self.runner.fill(load, min(max(valid, 0), load.external))
        self.scheduler.loaded(load.request_id, load.epoch, valid)
        self.check()

    def end_save(self, save: Save) -> None:
        self.saves.remove(save)
        self.scheduler.saved(save.request_id, save.epoch, save.serial)
        self.check()

    def end_all(self) -> None:
        for save in list(self.saves):
            self.end_save(save)
        for load in list(self.loads):
            self.end_load(load)

    def run(self, steps: int = 2000) -> None:
        """Step, and end what is outside, until every request has its answer."""
        for _ in range(steps):
            if not self.scheduler.requests:
                break
            self.step()
            self.end_all()
        self.end_all()
        self.check_end()

    def check(self) -> None:
        findings = audit(self.scheduler)
        assert not findings, findings

    def check_end(self) -> None:
        """All have ended, with the tokens of one process, and every position is accounted for."""
        assert not self.scheduler.requests, f"left after {self.steps} steps"
        assert not any(self.scheduler.pool.references)
        for request in self.requests:
            self._check_answer(request)
        executed = sum(leg_tokens(request).executed for request in self.requests)
        assert executed == self.runner.executed_positions

    def _check_answer(self, request: Request) -> None:
        order, account = request.order, leg_tokens(request)
        assert request.state is RequestState.FINISHED
        assert request.tokens == self.answer(request)
        assert min(account.local, account.external, account.recomputed, account.failed) >= 0
        if request.finish is not Finish.ABORT:
            assert account.local + account.external + account.computed == account.length
            most = order.prompt_len + order.max_tokens - account.length
            assert account.generated == (1 if order.prefill_only else most)

    def _lookup(self, query: Query) -> int | None:
        self.queries.append((query.request_id, query.local))
        return self._answers(query)

    def _cancel(self, request_id: str, epoch: int) -> bool:
        """A load that is cancelled writes nothing and has no event."""
        (load,) = (one for one in self.loads if (one.request_id, one.epoch) == (request_id, epoch))
        cancelled = self._cancels(load)
        if cancelled:
            self.loads.remove(load)
        return cancelled
