"""Random lives of many requests over a small pool: every token right, every invariant held."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvrelay.engine.core.audit import audit
from kvrelay.engine.core.external import Load, Loaded, Query, Save, Saved, TransferEvent
from kvrelay.engine.core.plan import EngineLimits
from kvrelay.engine.core.request import Finish, Order, Request, RequestState
from kvrelay.engine.core.scheduler import Scheduler
from kvrelay.engine.core.usage import leg_tokens
from tests.engine.fakes import VOCABULARY, ChainRunner, answer, naming


class Storm:
    """One scheduler, a chain runner, and a store that answers anything."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.size = self.random.choice([1, 2, 3, 4, 16])
        self.blocks = self.random.randint(3, 12)
        self.limits = EngineLimits(
            self.blocks,
            self.size,
            max_model_len=self.random.choice([self.blocks * self.size, 1000]),
            max_num_seqs=self.random.randint(1, 6),
            max_num_batched_tokens=self.random.randint(1, 2 * self.size + 3),
            headroom=self.random.randint(0, 2),
        )
        self.runner = ChainRunner(self.blocks, self.size)
        self.scheduler = Scheduler(self.limits, naming(), self._lookup, self._cancel)
        self.outside: list[Load | Save] = []
        self.done: list[TransferEvent] = []
        self.requests: list[Request] = []
        self.salts: dict[str, int] = {}
        self.wasted = 0
        self.times: dict[str, Counter[int]] = {}  # how often each position was executed
        self.first: dict[str, tuple[int, int]] = {}  # hits of the first admission that ran
        self.seen: Counter[str] = Counter()
        self.prompts = [self._tokens(self.random.randint(1, 3 * self.size)) for _ in range(3)]

    def run(self, requests: int) -> None:
        for number in range(requests):
            self._submit(f"r{number}")
            for _ in range(self.random.randint(0, 3)):
                self._act()
        for _ in range(100_000):
            if not (self.scheduler.requests or self.outside):
                break
            self._act()
        self._check_end()

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randint(0, 3) for _ in range(count)]

    def _lookup(self, query: Query) -> int | None:
        return self.random.choice([None, 0, 0, 1, self.size, 2 * self.size, 10_000, -3])

    def _cancel(self, request_id: str, epoch: int) -> bool:
        """A load that is cancelled writes nothing and has no event."""
        cancelled = self.random.random() < 0.5
        if cancelled:
            for job in list(self.outside):
                if isinstance(job, Load) and (job.request_id, job.epoch) == (request_id, epoch):
                    self.outside.remove(job)
        self.seen["cancelled"] += cancelled
        return cancelled

    def _submit(self, request_id: str) -> None:
        prompt = list(self.random.choice(self.prompts)) + self._tokens(self.random.randint(0, 4))
        capacity = min(self.blocks * self.size, self.limits.max_model_len)
        prompt = prompt[:capacity]
        most = capacity - len(prompt) + 1
        made = self.random.randint(0, min(most - 1, 3))
        self.salts[request_id] = salt = self.random.randint(0, 1)
        order = Order(
            request_id,
            tuple(prompt + answer(prompt, made, salt)),
            len(prompt),
            self.random.randint(made + 1, most),
            prefill_only=self.random.random() < 0.3,
        )
        self.requests.append(self.scheduler.submit(order))

    def _act(self) -> None:
        choice = self.random.random()
        if choice < 0.02 and self.scheduler.requests:
            standing = list(self.scheduler.requests.values())
            loading = [one for one in standing if one.state is RequestState.LOADING]
            self.scheduler.abort(self.random.choice(loading or standing).id)
        elif choice < 0.30 and self.outside:
            self._end(self.outside.pop(self.random.randrange(len(self.outside))))
        elif choice < 0.35 and self.done:
            self._tell(self.random.choice(self.done))  # again, late
        else:
            self._step()
        self._note_first()
        findings = audit(self.scheduler)
        assert not findings, findings

    def _end(self, job: Load | Save) -> None:
        if isinstance(job, Save):
            event: TransferEvent = Saved(job.request_id, job.epoch, job.serial, len(job.contents))
        else:
            valid = self.random.choice([-1, 0, 1, self.size, job.external, job.external, 10_000])
            self.runner.fill(job, min(max(valid, 0), job.external))
            event = Loaded(job.request_id, job.epoch, valid)
        self._tell(event)
        self.done.append(event)

    def _tell(self, event: TransferEvent) -> None:
        if isinstance(event, Loaded):
            self.scheduler.loaded(event.request_id, event.epoch, event.valid)
        else:
            self.scheduler.saved(event.request_id, event.epoch, event.serial)

    def _step(self) -> None:
        plan = self.scheduler.schedule()
        assert sum(entry.count for entry in plan.entries) <= self.limits.max_num_batched_tokens
        assert len(self.scheduler.running) + self.scheduler.loading <= self.limits.max_num_seqs
        self._note_first()
        residents = [request for request in self.requests if request.residency is not None]
        for request in plan.preempted:
            assert all(other.arrival < request.arrival for other in residents)
        self.outside += [*plan.loads, *plan.saves]
        sampled = [
            None if token is None else (token + self.salts[entry.request.id]) % VOCABULARY
            for entry, token in zip(plan.entries, self.runner.plan(plan), strict=True)
        ]
        if self.random.random() < 0.01 and self.scheduler.requests:  # between plan and commit
            self.scheduler.abort(self.random.choice(list(self.scheduler.requests)))
            self.wasted += sum(
                entry.count
                for entry in plan.entries
                if entry.request.state is RequestState.FINISHED
            )
        for entry in plan.entries:
            if entry.request.residency is not None:
                times = self.times.setdefault(entry.request.id, Counter())
                times.update(range(entry.start, entry.start + entry.count))
        self.outside += self.scheduler.commit(plan, sampled).saves

    def _note_first(self) -> None:
        for request in self.scheduler.running:
            admission = request.resident.admission
            self.first.setdefault(request.id, (admission.local, admission.external))

    def _check_end(self) -> None:
        assert not self.scheduler.requests, "not every request ended"
        pool = self.scheduler.pool
        assert not any(pool.references)
        assert len(pool.free) == self.blocks
        executed = 0
        for request in self.requests:
            self.seen["local"] += leg_tokens(request).local
            self.seen["external"] += leg_tokens(request).external
            self.seen["recomputed"] += leg_tokens(request).recomputed
            self.seen["failed"] += request.failed
            self._check_request(request)
            executed += leg_tokens(request).executed
        assert executed + self.wasted == self.runner.executed_positions

    def _check_request(self, request: Request) -> None:
        order, account = request.order, leg_tokens(request)
        prompt = list(order.tokens[: order.prompt_len])
        assert request.state is RequestState.FINISHED
        made = answer(prompt, request.length - order.prompt_len, self.salts[request.id])
        assert request.tokens == prompt + made
        assert min(account.computed, account.recomputed, account.failed) >= 0
        times = self.times.get(request.id, Counter())
        assert account.executed == times.total()
        assert account.recomputed == times.total() - len(times)
        assert (account.local, account.external) == self.first.get(request.id, (0, 0))
        if request.finish is not Finish.ABORT:
            assert account.local + account.external + account.computed == account.length
            most = order.max_tokens - len(order.tokens) + order.prompt_len
            assert account.generated == (1 if order.prefill_only else most)


@pytest.mark.parametrize("group", range(20))
def test_storm(group: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(group * 20, group * 20 + 20):
        print(f"seed {seed}")
        storm = Storm(seed)
        storm.run(requests=12)
        seen.update(storm.seen, preemptions=storm.scheduler.preemptions)
    print(seen)
    counted = ("local", "external", "recomputed", "failed", "preemptions", "cancelled")
    assert all(seen[what] for what in counted)
