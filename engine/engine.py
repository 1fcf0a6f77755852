"""The engine of a worker: one thread that schedules, runs the model and tells what happened.

All accounting is touched by this thread alone. Other threads hand it orders and get updates
through ``deliver``, called once a step on the engine's thread with everything that is new.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from common.errors import Exhausted, KvrelayError, Unavailable
from engine.audit import Finding, audit
from engine.external import Connector, Event, Loaded, Save
from engine.plan import Committed, Limits, Plan
from engine.request import Finish, Naming, Order, Request, State
from engine.sampling import Sampling
from engine.scheduler import Scheduler
from engine.task import StopText, Task
from engine.updates import Failed, Token, Update
from engine.work import Sampled, Work

log = logging.getLogger(__name__)

Deliver = Callable[[Sequence[tuple[str, Update]]], None]
T = TypeVar("T")


class ModelRunner(Protocol):
    """What the loop needs of the model."""

    @property
    def executed_positions(self) -> int: ...

    def execute(self, works: Sequence[Work]) -> Sequence[Sampled | None]: ...


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engine is, as numbers a router can compare."""

    waiting: int
    waiting_tokens: int
    loading: int
    running: int
    saving: int
    free_blocks: int
    held_blocks: int
    steps: int
    executed: int
    preemptions: int


class Engine:
    """Serves requests until closed. ``max_waiting`` bounds the queue, in requests."""

    def __init__(
        self,
        runner: ModelRunner,
        limits: Limits,
        naming: Naming,
        connector: Connector,
        deliver: Deliver,
        max_waiting: int = 1024,
        audit_steps: bool = False,
    ) -> None:
        self.limits = limits
        self._runner = runner
        self._connector = connector
        self._scheduler = Scheduler(limits, naming, connector.lookup)
        self._deliver = deliver
        self._max_waiting = max_waiting
        self._audit_steps = audit_steps
        self._tasks: dict[str, Task] = {}
        self._saves: dict[tuple[str, int, int], tuple[Task | None, Save]] = {}
        self._updates: list[tuple[str, Update]] = []
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._steps = 0
        self._load = self._measure()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- called from any thread -----------------------------------------------------------------

    def start(self) -> None:
        """Start the engine's thread and the connector's."""
        self._connector.start(self._wake.set)
        self._thread.start()

    def submit(self, order: Order, sampling: Sampling, stop_text: StopText | None = None) -> None:
        """Queue a request; what becomes of it is told through ``deliver``, under its id."""
        if self._closing.is_set():
            raise Unavailable("the worker is stopping")
        self._post(lambda: self._submit(order, sampling, stop_text))

    def abort(self, request_id: str) -> None:
        """End a request; nothing more is told about it. Unknown ones are no error."""
        self._post(lambda: self._abort(request_id))

    def load(self) -> EngineLoad:
        """The load as it was after the last step, without waiting for the thread."""
        return self._load

    def audit(self) -> Future[list[Finding]]:
        """Check the invariants between two steps."""
        return self._call(lambda: audit(self._scheduler))

    def close(self, timeout: float = 10.0) -> None:
        """Stop; open requests fail as unavailable."""
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._connector.close()

    def _call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - it goes to the caller, who waits for it
                future.set_exception(error)

        self._post(command)
        return future

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._wake.set()

    # --- the engine's thread --------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                busy = self._step()
            except Exception as error:  # noqa: BLE001 - the edge: it ends the requests of the step
                self._fail_step(error)
                busy = True
            self._publish()
            if not busy:
                self._wake.wait(timeout=1.0)
            self._wake.clear()
        self._run_commands()
        self._fail(list(self._tasks), "the worker is stopping")
        self._publish()

    def _step(self) -> bool:
        """Commands, events, one step of the model. False when there was nothing to compute."""
        self._run_commands()
        for event in self._connector.poll():
            self._take_event(event)
        plan = self._scheduler.schedule()
        self._begin(plan)
        sampled = self._execute(plan)
        tokens = [None if item is None else item.token for item in sampled]
        committed = self._scheduler.commit(plan, tokens)
        self._report(committed, [item for item in sampled if item is not None])
        if self._audit_steps:
            self._check_invariants()
        return bool(plan.entries)

    def _run_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _begin(self, plan: Plan) -> None:
        now = time.monotonic()
        for request in plan.preempted:
            self._tasks[request.id].preemptions += 1
        for load in plan.loads:
            self._note_admitted(self._tasks[load.request_id], now)
            self._connector.load(load)
        for entry in plan.entries:
            task = self._tasks[entry.request.id]
            self._note_admitted(task, now)
            if task.running is None:
                task.running = now
        self._start_saves(plan.saves)

    def _note_admitted(self, task: Task, now: float) -> None:
        if task.admitted is None:
            task.admitted = now

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
            task = self._tasks[request.id]
            if task.first_token is None:
                task.first_token = now
            if task.stop_text is not None and task.stop_text.stops_at(output.token):
                finish = finish or Finish.STOP
                self._scheduler.abort(request.id, finish)
            self._updates.append((request.id, Token(item, finish)))
            if request.state is State.FINISHED:
                self._retire(task)

    def _start_saves(self, saves: Sequence[Save]) -> None:
        for save in saves:
            task = self._tasks.get(save.request_id)
            if task is not None:
                task.note_saving(save, self.limits.block_size)
            self._saves[save.request_id, save.epoch, save.serial] = task, save
            self._connector.save(save)

    def _take_event(self, event: Event) -> None:
        if isinstance(event, Loaded):
            request = self._scheduler.loaded(event.request_id, event.epoch, event.valid)
            if request is not None:
                self._note_loaded(request)
            return
        self._scheduler.saved(event.request_id, event.epoch, event.serial)
        task, save = self._saves.pop((event.request_id, event.epoch, event.serial), (None, None))
        if task is not None and save is not None:
            task.note_saved(save, event.stored)
            if task.request.state is State.FINISHED:
                self._retire(task)

    def _note_loaded(self, request: Request) -> None:
        admission, size = request.resident.admission, self.limits.block_size
        names = request.names[admission.local // size : admission.hit // size]
        self._tasks[request.id].note_loaded(names)

    def _retire(self, task: Task) -> None:
        """Tell the account of a finished request, once its saves are over if they matter."""
        request = task.request
        if self._tasks.get(request.id) is not task:
            return
        if request.order.prefill_only and task.open_saves:
            return
        del self._tasks[request.id]
        self._connector.release(request.id)
        self._updates.append((request.id, task.ended(self.limits.block_size)))

    def _submit(self, order: Order, sampling: Sampling, stop_text: StopText | None) -> None:
        try:
            if len(self._scheduler.waiting) >= self._max_waiting:
                raise Exhausted(f"{self._max_waiting} requests are waiting here", retry_after=1.0)
            if order.request_id in self._tasks:
                raise Unavailable(f"request {order.request_id!r} is still being saved here")
            request = self._scheduler.submit(order)
        except KvrelayError as error:
            self._updates.append((order.request_id, Failed(error)))
        else:
            self._tasks[request.id] = Task(request, sampling, stop_text, time.monotonic())

    def _abort(self, request_id: str) -> None:
        self._scheduler.abort(request_id)
        if self._tasks.pop(request_id, None) is not None:
            self._connector.release(request_id)

    def _fail_step(self, error: Exception) -> None:
        """End the requests of the step that failed; all of them, if it failed outside a plan."""
        log.error("a step failed; its requests are ended", exc_info=error)
        plan = self._scheduler.discard()
        entries = plan.entries if plan is not None else ()
        self._fail([entry.request.id for entry in entries] or list(self._tasks), "a step failed")

    def _fail(self, request_ids: Sequence[str], reason: str) -> None:
        for request_id in request_ids:
            self._updates.append((request_id, Failed(Unavailable(reason))))
            self._abort(request_id)

    def _check_invariants(self) -> None:
        findings = audit(self._scheduler)
        if findings:
            raise RuntimeError(f"the accounting is broken: {findings}")

    def _publish(self) -> None:
        self._load = self._measure()
        if self._updates:
            updates, self._updates = self._updates, []
            self._deliver(updates)

    def _measure(self) -> EngineLoad:
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
            preemptions=scheduler.preemptions,
        )
