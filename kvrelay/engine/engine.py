"""The engine of a worker: one thread that takes step after step.

A step joins scheduler, model runner, connector (external KV) and legs (text, times, accounts). Only
this thread touches them: other threads post commands, and get a step's updates by ``deliver``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from kvrelay.engine.core.audit import Finding, audit
from kvrelay.engine.core.blocks import Naming
from kvrelay.engine.core.external import Connector, Loaded, Save, TransferEvent
from kvrelay.engine.core.foresight import NOTHING, entries_ahead
from kvrelay.engine.core.journal import Journal
from kvrelay.engine.core.legs import Leg, Legs, StopChecker
from kvrelay.engine.core.plan import NO_TOKEN, Committed, EngineLimits, Entry, Plan
from kvrelay.engine.core.request import Finish, Order
from kvrelay.engine.core.scheduler import Scheduler
from kvrelay.engine.core.totals import Totals
from kvrelay.engine.core.updates import (
    Foresee,
    LegTrace,
    OutputGrammar,
    Sampled,
    Token,
    Update,
    Work,
)
from kvrelay.engine.safe_connector import SafeConnector
from kvrelay.engine.stepping import SteppingThread
from kvrelay.errors import Exhausted, KvrelayError, Unavailable
from kvrelay.process import logs
from kvrelay.sampling import Sampling

log = logging.getLogger(__name__)

Deliver = Callable[[Sequence[tuple[str, Update]]], None]


class ModelRunner(Protocol):
    """The model as the engine runs it."""

    @property
    def executed_positions(self) -> int: ...
    def execute(self, works: Sequence[Work], foresee: Foresee) -> Sequence[Sampled | None]:
        """Compute a step. A runner may call ``foresee`` once, while a device computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """``max_waiting`` bounds the queue, in requests. With ``audit_steps`` every step is audited.

    ``on_fatal`` is called when the engine cannot continue, or when a step takes longer than
    ``step_seconds``: the process should exit and be restarted. ``journal`` gets a line for every
    call of the scheduler (``core.journal``), ``on_step`` seconds, requests, positions of a step.
    ``on_rest`` is called on the engine's thread when there is nothing to compute.
    """

    max_waiting: int = 1024
    audit_steps: bool = False
    step_seconds: float = 120.0
    on_fatal: Callable[[], None] = lambda: None
    journal: Callable[[str], object] | None = None
    on_step: Callable[[float, int, int], object] = lambda seconds, requests, positions: None
    on_rest: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is and what it has done."""

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


class Engine(SteppingThread):
    """Serves requests until closed."""

    def __init__(
        self,
        runner: ModelRunner,
        limits: EngineLimits,
        naming: Naming,
        connector: Connector,
        deliver: Deliver,
        options: EngineOptions | None = None,
    ) -> None:
        self._limits = limits
        self._runner = runner
        self._transfers = connector
        self._deliver = deliver
        self._options = options = options or EngineOptions()
        super().__init__(options.step_seconds, options.on_fatal, options.on_rest)
        self._connector = safe = SafeConnector(connector)
        self._scheduler = (
            Scheduler(limits, naming, safe.lookup, safe.cancel)
            if options.journal is None
            else Journal(limits, naming, safe.lookup, options.journal, safe.cancel)
        )
        self._legs = Legs(limits.block_size)
        self._foreseen = NOTHING  # while a device computed the last step
        self._works: dict[Entry, Work] = {}
        self._steps = 0
        self._load = self._measure()

    def start(self) -> None:
        """Start the engine's thread and the connector's."""
        self._transfers.start(self._wake.set)
        self._thread.start()
        self._watchdog.start()

    def submit(
        self,
        order: Order,
        sampling: Sampling,
        stop_checker: StopChecker | None = None,
        grammar: OutputGrammar | None = None,
        trace: LegTrace | None = None,
    ) -> None:
        """Queue a request; its updates, a refusal included, go to ``deliver`` under its id."""
        if self._closing.is_set():
            raise Unavailable("the worker is stopping")
        self._post(lambda: self._submit(order, sampling, stop_checker, grammar, trace))

    def abort(self, request_id: str) -> None:
        """End a request without further updates. An unknown id is no error."""
        self._post(lambda: self._abort(request_id))

    def load(self) -> EngineLoad:
        """The load after the last step; does not wait for the thread."""
        return self._load

    def audit(self) -> Future[list[Finding]]:
        """Check the invariants between two steps; the future holds the broken ones."""
        return self._call(self._audit)

    def close(self, timeout: float = 10.0) -> None:
        """Stop; open requests fail as unavailable."""
        self._end(timeout)
        self._transfers.close()

    # --- one step -------------------------------------------------------------------------------

    def _publish(self) -> None:
        self._load = self._measure()
        self._deliver_updates()

    def _deliver_updates(self) -> None:
        updates = self._legs.take_updates()
        if updates:
            self._deliver(updates)

    def _step(self) -> bool:
        for event in self._connector.poll():
            self._take_event(event)
        plan = self._scheduler.schedule(self._foreseen)
        self._begin(plan)
        sampled = self._execute(plan)
        committed = self._scheduler.commit(plan, [_committed(item) for item in sampled])
        self._legs.note_step(committed)
        self._start_saves(committed.saves)
        self._report(committed, [item for item in sampled if item is not None and not item.error])
        self._fail_tokenless(plan, sampled)
        if self._options.audit_steps and (findings := self._audit()):
            raise RuntimeError(f"the accounting is broken: {findings}")
        return bool(plan.entries) or plan.unnamed

    def _take_event(self, event: TransferEvent) -> None:
        if isinstance(event, Loaded):
            request = self._scheduler.loaded(event.request_id, event.epoch, event.valid)
            self._legs.end_load(event, request)
            return
        self._scheduler.saved(event.request_id, event.epoch, event.serial)
        leg = self._legs.end_save(event)
        if leg is not None:
            self._end_leg(leg)

    def _begin(self, plan: Plan) -> None:
        now = time.monotonic()
        if plan.preempted:
            self._legs.note_preempted(plan.preempted)
        for load in plan.loads:
            self._note_admitted(self._legs[load.request_id], now)
            self._legs.start_load(load)
            self._connector.load(load)
        for entry in plan.entries:
            leg = self._legs[entry.request.id]
            self._note_admitted(leg, now)
            leg.note_running(now)
        self._start_saves(plan.saves)
        self._deliver_updates()  # before the model runs: if it dies, the admissions are known

    def _note_admitted(self, leg: Leg, now: float) -> None:
        if leg.first is None:
            leg.lookup = self._connector.looked_up(leg.request.id, now)
            self._legs.note_admission(leg, self._connector.why(leg.request.id), now)

    def _start_saves(self, saves: Sequence[Save]) -> None:
        for save in saves:
            self._legs.start_save(save)
            self._connector.save(save)

    def _execute(self, plan: Plan) -> Sequence[Sampled | None]:
        self._foreseen = NOTHING
        if not plan.entries:
            return []
        self._steps += 1
        begun, before = time.monotonic(), self._runner.executed_positions
        works = [self._works.get(entry) or self._work(entry) for entry in plan.entries]
        self._works = {}
        sampled = self._runner.execute(works, lambda: self._foresee(plan))
        positions = self._runner.executed_positions - before
        self._options.on_step(time.monotonic() - begun, len(works), positions)
        return sampled

    def _work(self, entry: Entry) -> Work:
        return self._legs[entry.request.id].work(entry)

    def _foresee(self, plan: Plan) -> Sequence[Work]:
        """See ``Foresee``."""
        self._foreseen = entries_ahead(plan, self._limits.block_size)
        self._works = {entry: self._work(entry) for entry in self._foreseen.values()}
        return list(self._works.values())

    def _report(self, committed: Committed, sampled: Sequence[Sampled]) -> None:
        now = time.monotonic()
        for output, item in zip(committed.outputs, sampled, strict=True):
            request_id = output.request.id
            leg = self._legs[request_id]
            self._legs.note_token(leg, now)
            finish = output.finish
            try:
                stops = leg.stop_checker is not None and leg.stop_checker.stops_at(item.token)
            except Exception as error:  # noqa: BLE001 - the edge of one request: it ends that one
                self._fail_text(request_id, item.token, error)
                continue
            if stops:
                finish = finish or Finish.STOP
                self._scheduler.abort(request_id, finish)
            self._legs.queue_update(request_id, Token(item, finish))
            self._end_leg(leg)

    def _fail_tokenless(self, plan: Plan, sampled: Sequence[Sampled | None]) -> None:
        """End the requests for which no token was possible."""
        for entry, item in zip(plan.entries, sampled, strict=True):
            if item is not None and item.error is not None:
                self._legs.fail(entry.request.id, item.error)
                self._abort(entry.request.id)

    # --- requests -------------------------------------------------------------------------------

    def _submit(
        self,
        order: Order,
        sampling: Sampling,
        stop_checker: StopChecker | None,
        grammar: OutputGrammar | None,
        trace: LegTrace | None,
    ) -> None:
        limit = self._options.max_waiting
        try:
            if len(self._scheduler.waiting) >= limit:
                raise Exhausted(f"{limit} requests are waiting here", retry_after=1.0)
            if order.request_id in self._legs:
                raise Unavailable(f"request {order.request_id!r} is still being saved here")
            request = self._scheduler.submit(order)
        except KvrelayError as error:
            self._legs.fail(order.request_id, error)
        else:
            now = time.monotonic()
            self._legs.add(Leg(request, sampling, stop_checker, now, grammar, trace))
            self._connector.follow(order.request_id, trace)

    def _abort(self, request_id: str) -> None:
        self._scheduler.abort(request_id)
        now = time.monotonic()
        if self._legs.drop(request_id, self._connector.looked_up(request_id, now), now):
            self._connector.release(request_id)

    def _end_leg(self, leg: Leg) -> None:
        """Send the account of a leg if it is complete."""
        if self._legs.end(leg):
            self._connector.release(leg.request.id)

    def _fail_all(self, reason: str) -> None:
        self._fail(self._legs.ids, reason)

    def _fail(self, request_ids: Sequence[str], reason: str) -> None:
        for request_id in request_ids:
            self._legs.fail(request_id, Unavailable(reason))
            self._abort(request_id)

    def _fail_text(self, request_id: str, token: int, error: Exception) -> None:
        leg = logs.about_leg(request_id)
        log.error("no text for token %d of %s", token, request_id, exc_info=error, extra=leg)
        self._fail([request_id], "the output cannot be decoded to check for stop strings")

    def _fail_step(self, error: Exception) -> None:
        """End the requests of the step that failed; all requests, if it failed outside a plan.

        Raises if the scheduler then still has requests: every further step would fail.
        """
        log.error("a step failed; its requests are ended", exc_info=error)
        plan = self._scheduler.discard()
        self._foreseen = NOTHING
        failed = self._legs.ids
        if plan is not None and plan.entries:
            failed = [entry.request.id for entry in plan.entries]
            failed += [load.request_id for load in plan.loads]
        self._fail(failed, "a step failed")
        if not self._legs.ids and (self._scheduler.running or self._scheduler.waiting):
            raise RuntimeError("a request that has ended is still queued in the scheduler")

    # --- measures -------------------------------------------------------------------------------

    def _audit(self) -> list[Finding]:
        executed = self._runner.executed_positions
        return audit(self._scheduler) + list(self._legs.audit(executed))

    def _measure(self) -> EngineLoad:
        scheduler = self._scheduler
        free = len(scheduler.pool.free)
        return EngineLoad(
            waiting=len(scheduler.waiting),
            waiting_tokens=scheduler.waiting_tokens,
            loading=scheduler.loading,
            running=len(scheduler.running),
            saving=len(scheduler.saves),
            free_blocks=free,
            held_blocks=self._limits.num_blocks - free,
            steps=self._steps,
            executed=self._runner.executed_positions,
            late_events=scheduler.late_events,
            totals=self._legs.totals,
        )


def _committed(item: Sampled | None) -> int | None:
    """What ``Scheduler.commit`` gets for an entry."""
    if item is None:
        return None
    return item.token if item.error is None else NO_TOKEN
