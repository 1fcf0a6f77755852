"""One step after another: what the engine does, without its thread.

Events and orders in, the model run, updates out. It joins the scheduler (who and what), the runner
(the model), the connector (external KV) and the tasks (text, times) of the requests under way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.engine.core.audit import Finding, audit
from kvrelay.engine.core.external import Connector, Loaded, Save, TransferEvent
from kvrelay.engine.core.journal import Journal
from kvrelay.engine.core.plan import Committed, EngineLimits, Plan
from kvrelay.engine.core.request import Finish, Naming, Order, Request, RequestState
from kvrelay.engine.core.scheduler import Scheduler
from kvrelay.engine.core.task import LegRecord, StopChecker
from kvrelay.engine.core.totals import Totals
from kvrelay.engine.core.updates import Failed, Token, Update
from kvrelay.engine.core.usage import LegTokens, leg_tokens
from kvrelay.engine.core.work import Sampled, Work
from kvrelay.engine.safe_connector import SafeConnector
from kvrelay.errors import Exhausted, KvrelayError, Unavailable
from kvrelay.sampling import Sampling

log = logging.getLogger(__name__)


class ModelRunner(Protocol):
    """What the loop needs of the model."""

    @property
    def executed_positions(self) -> int: ...

    def execute(self, works: Sequence[Work]) -> Sequence[Sampled | None]: ...


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is, and what it did, as numbers that others can compare."""

    waiting: int
    waiting_tokens: int
    loading: int
    running: int
    saving: int
    free_blocks: int
    held_blocks: int
    steps: int
    executed: int
    late_events: int
    totals: Totals


class Steps:
    """Used by one thread. ``max_waiting`` bounds the queue, in requests.

    ``journal`` is handed a line for every call of the scheduler: see
    ``kvrelay.engine.core.journal``.
    """

    def __init__(
        self,
        runner: ModelRunner,
        limits: EngineLimits,
        naming: Naming,
        connector: Connector,
        max_waiting: int,
        journal: Callable[[str], object] | None = None,
    ) -> None:
        self.limits = limits
        self._runner = runner
        self._connector = careful = SafeConnector(connector)
        self._scheduler = (
            Scheduler(limits, naming, careful.lookup)
            if journal is None
            else Journal(limits, naming, careful.lookup, journal)
        )
        self._max_waiting = max_waiting
        self._tasks: dict[str, LegRecord] = {}
        self._saves: dict[tuple[str, int, int], tuple[LegRecord | None, Save]] = {}
        self._loads: dict[tuple[str, int], int] = {}  # tokens ordered by each that is open
        self._updates: list[tuple[str, Update]] = []
        self._steps = 0
        self._totals = Totals()

    def submit(self, order: Order, sampling: Sampling, stop_text: StopChecker | None) -> None:
        """Queue a request; one that is refused gets its ``Failed``."""
        try:
            if len(self._scheduler.waiting) >= self._max_waiting:
                raise Exhausted(f"{self._max_waiting} requests are waiting here", retry_after=1.0)
            if order.request_id in self._tasks:
                raise Unavailable(f"request {order.request_id!r} is still being saved here")
            request = self._scheduler.submit(order)
        except KvrelayError as error:
            self._updates.append((order.request_id, Failed(error)))
        else:
            self._tasks[request.id] = LegRecord(request, sampling, stop_text, time.monotonic())

    def abort(self, request_id: str) -> None:
        """End a request; unknown ones are no error."""
        self._scheduler.abort(request_id)
        task = self._tasks.get(request_id)
        if task is not None:
            self._forget(task, leg_tokens(task.request))

    def step(self) -> bool:
        """Take events, run the model once. False when there was nothing to compute."""
        for event in self._connector.poll():
            self._take_event(event)
        plan = self._scheduler.schedule()
        self._begin(plan)
        sampled = self._execute(plan)
        tokens = [None if item is None else item.token for item in sampled]
        committed = self._scheduler.commit(plan, tokens)
        self._report(committed, [item for item in sampled if item is not None])
        return bool(plan.entries)

    def take_updates(self) -> list[tuple[str, Update]]:
        """What happened since the last call, with whose request it is."""
        updates = self._updates
        self._updates = []
        return updates

    def fail_step(self, error: Exception) -> None:
        """End the requests of the step that failed; all of them, if it failed outside a plan.

        Raises if somebody stands in a queue after that: then every step would fail from now on.
        """
        log.error("a step failed; its requests are ended", exc_info=error)
        plan = self._scheduler.discard()
        failed = list(self._tasks)
        if plan is not None and plan.entries:
            failed = [entry.request.id for entry in plan.entries]
            failed += [load.request_id for load in plan.loads]
        self._fail(failed, "a step failed")
        if not self._tasks and (self._scheduler.running or self._scheduler.waiting):
            raise RuntimeError("a request that has ended still stands in a queue")

    def fail_all(self, reason: str) -> None:
        """End every request."""
        self._fail(list(self._tasks), reason)

    def _fail(self, request_ids: Sequence[str], reason: str) -> None:
        for request_id in request_ids:
            self._updates.append((request_id, Failed(Unavailable(reason))))
            self.abort(request_id)

    def audit(self) -> list[Finding]:
        """The invariants of the core; I5: the runner's own count against the admissions'; I9."""
        findings = audit(self._scheduler)
        counted = self._totals.executed + sum(
            task.request.executed for task in self._tasks.values()
        )
        if counted != self._runner.executed_positions:
            ran = self._runner.executed_positions
            findings.append(Finding("I5", None, f"{ran} positions executed, {counted} accounted"))
        if not self._totals.adds_up:
            findings.append(Finding("I9", None, f"sums by source do not add up: {self._totals}"))
        return findings

    def measure(self) -> EngineLoad:
        """The load as it is now."""
        scheduler = self._scheduler
        free = len(scheduler.pool.free)
        return EngineLoad(
            waiting=len(scheduler.waiting),
            waiting_tokens=sum(request.length for request in scheduler.waiting),
            loading=scheduler.loading,
            running=len(scheduler.running),
            saving=len(scheduler.saves),
            free_blocks=free,
            held_blocks=self.limits.num_blocks - free,
            steps=self._steps,
            executed=self._runner.executed_positions,
            late_events=scheduler.late_events,
            totals=self._totals,
        )

    def _begin(self, plan: Plan) -> None:
        now = time.monotonic()
        for request in plan.preempted:
            self._tasks[request.id].preemptions += 1
        for load in plan.loads:
            self._note_admitted(self._tasks[load.request_id], load.epoch, now)
            self._loads[load.request_id, load.epoch] = load.external
            self._connector.load(load)
        for entry in plan.entries:
            task = self._tasks[entry.request.id]
            self._note_admitted(task, entry.epoch, now)
            if task.running is None:
                task.running = now
        self._start_saves(plan.saves)

    def _note_admitted(self, task: LegRecord, epoch: int, now: float) -> None:
        if task.epoch != epoch:
            task.note_admitted(epoch, self._connector.why(task.request.id), now)

    def _execute(self, plan: Plan) -> Sequence[Sampled | None]:
        if not plan.entries:
            return []
        self._steps += 1
        return self._runner.execute(
            [
                Work(
                    tokens=entry.request.tokens,
                    start=entry.start,
                    count=entry.count,
                    blocks=entry.request.resident.blocks,
                    prompt_len=entry.request.order.prompt_len,
                    sampling=self._tasks[entry.request.id].sampling if entry.samples else None,
                )
                for entry in plan.entries
            ]
        )

    def _report(self, committed: Committed, sampled: list[Sampled]) -> None:
        self._start_saves(committed.saves)
        now = time.monotonic()
        for output, item in zip(committed.outputs, sampled, strict=True):
            request, finish = output.request, output.finish
            task, begun = self._tasks[request.id], None
            if task.first_token is None:
                begun = admission = request.last_admission
                task.note_first_token(admission, self.limits.block_size, now)
                sources = task.sources_of(admission)
                self._totals = self._totals.with_first_token(admission, sources, task.missed)
            stops = self._stops(task, output.token)
            if stops is None:
                self._fail([request.id], "the output has no text to look for stop strings in")
                continue
            if stops:
                finish = finish or Finish.STOP
                self._scheduler.abort(request.id, finish)
            self._updates.append((request.id, Token(item, finish, begun)))
            if request.state is RequestState.FINISHED:
                self._retire(task)

    def _stops(self, task: LegRecord, token: int) -> bool | None:
        """Whether a stop string is complete; ``None`` when no text can be made of the token."""
        try:
            return task.stop_text is not None and task.stop_text.stops_at(token)
        except Exception as error:  # noqa: BLE001 - the edge of one request: it ends that request
            self._no_text(task, token, error)
            return None

    def _no_text(self, task: LegRecord, token: int, error: Exception) -> None:
        log.error("no text for token %d of %s", token, task.request.id, exc_info=error)

    def _start_saves(self, saves: Sequence[Save]) -> None:
        for save in saves:
            task = self._tasks.get(save.request_id)
            if task is not None:
                task.note_saving(save, self.limits.block_size)
            self._saves[save.request_id, save.epoch, save.serial] = task, save
            self._connector.save(save)

    def _take_event(self, event: TransferEvent) -> None:
        if isinstance(event, Loaded):
            ordered = self._loads.pop((event.request_id, event.epoch), 0)
            request = self._scheduler.loaded(event.request_id, event.epoch, event.valid)
            if request is not None:
                self._note_loaded(request, event)
            else:
                self._totals = self._totals.with_late(min(max(event.valid, 0), ordered))
            return
        self._scheduler.saved(event.request_id, event.epoch, event.serial)
        task, save = self._saves.pop((event.request_id, event.epoch, event.serial), (None, None))
        if task is not None and save is not None:
            task.note_saved(save, event.stored)
            if task.request.state is RequestState.FINISHED:
                self._retire(task)

    def _note_loaded(self, request: Request, event: Loaded) -> None:
        admission, size = request.resident.admission, self.limits.block_size
        names = request.names[admission.local // size : admission.hit // size]
        self._tasks[request.id].note_loaded(names, event)

    def _retire(self, task: LegRecord) -> None:
        """Tell the account of a finished request, once its saves are over if they matter."""
        request = task.request
        if self._tasks.get(request.id) is not task:
            return
        if request.order.prefill_only and task.open_saves:
            return
        ended = task.ended(self.limits.block_size)
        self._updates.append((request.id, ended))
        self._forget(task, ended.tokens)

    def _forget(self, task: LegRecord, account: LegTokens) -> None:
        """A leg leaves, in whatever way: here its sums are added, once."""
        request = task.request
        del self._tasks[request.id]
        self._connector.release(request.id)
        self._totals = self._totals.with_leg(account, task.preemptions, request.finish)
