"""The vLLM engine of a worker: one thread that steps vLLM's ``EngineCore`` in this process.

No process lies between: an admission is told before its step runs, the audit reads vLLM's own
tables, and nothing outlives the worker. Sampling is ours (``kvrelay.engine.vllm.sampling``), so a
stream continues on another worker with the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from kvrelay.engine.core.audit import Finding
from kvrelay.engine.core.legs import StopChecker
from kvrelay.engine.core.plan import EngineLimits
from kvrelay.engine.core.request import Finish, Order
from kvrelay.engine.core.updates import (
    Failed,
    LegTrace,
    OutputGrammar,
    Sampled,
    Token,
    Update,
)
from kvrelay.engine.engine import Deliver, EngineLoad, EngineOptions
from kvrelay.engine.stepping import SteppingThread
from kvrelay.engine.vllm.kv.account import LegListener, RequestAccount
from kvrelay.engine.vllm.serving.legs import VllmLeg, VllmLegs
from kvrelay.errors import Exhausted, KvrelayError, Unavailable
from kvrelay.sampling import Sampling

POLL_SECONDS = 0.002  # between steps that only wait for loads, saves or answers of the store


@dataclass(frozen=True, slots=True)
class CoreOutput:
    """The next token of a request; with ``last`` vLLM has ended the request."""

    request_id: str
    sampled: Sampled
    last: bool


@dataclass(frozen=True, slots=True)
class CoreLoad:
    """How busy vLLM's scheduler is; in requests, tokens, saves and blocks."""

    waiting: int
    waiting_tokens: int
    loading: int
    running: int
    saving: int
    free_blocks: int


class StepListener(LegListener, Protocol):
    """Hears of requests and of steps, on the thread that takes these."""

    def scheduled(self, counts: Mapping[str, int], preempted: Collection[str]) -> None:
        """A step begins: positions by request, and the requests that it preempted."""


class SteppedCore(Protocol):
    """The part of ``EngineCore`` that the engine drives; ``core.VllmCore`` has it."""

    def listen(self, listener: StepListener) -> None:
        """Report requests to ``listener`` from now on."""

    def add(self, order: Order, sampling: Sampling, grammar: OutputGrammar | None) -> None:
        """Queue a request."""

    def abort(self, request_id: str) -> None:
        """End a request; no effect on one that has ended."""

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do; a save that is under way counts."""

    def step(self) -> Sequence[CoreOutput]:
        """Schedule, execute and sample once."""

    def account(self, request_id: str, saves: bool = True) -> RequestAccount:
        """The account of a request that has not left; see ``SchedulerSide.account``."""

    def load(self) -> CoreLoad:
        """The load now."""

    def audit(self) -> list[Finding]:
        """The broken invariants."""

    def close(self) -> None:
        """Stop; frees the device."""


class VllmEngine(SteppingThread):
    """Serves requests until closed. ``open_core`` runs on the engine's thread, as every step."""

    def __init__(self, deliver: Deliver, options: EngineOptions | None = None) -> None:
        self._options = options = options or EngineOptions()
        super().__init__(options.step_seconds, options.on_fatal)
        self._deliver = deliver
        self._core: SteppedCore | None = None
        self._limits: EngineLimits | None = None
        self._legs = VllmLegs()
        self._steps = 0
        self._positions = 0  # of the step that runs
        self._requests = 0
        self._load = self._measure()

    def open(self, open_core: Callable[[], tuple[SteppedCore, EngineLimits]]) -> None:
        """Start the thread and build the core on it; raises what that raises."""
        self._thread.start()
        try:
            self._call(lambda: self.attach(*open_core())).result()
        except BaseException:
            self._end(0.0)
            raise

    def attach(self, core: SteppedCore, limits: EngineLimits) -> None:
        """Serve with this core; ``open`` does so on the engine's thread."""
        self._core = core
        self._limits = limits
        core.listen(self)

    def start(self) -> None:
        """Watch for steps that hang, from now on."""
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
        leg = VllmLeg(order, sampling, stop_checker, grammar, time.monotonic(), trace)
        self._post(lambda: self._submit(leg))

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
        if self._thread.ident is None:  # it was never started: the caller took the steps
            self._leave()

    def _leave(self) -> None:
        """Close the core on the thread that made it: its ranks end with that thread."""
        if self._core is not None:
            self._core.close()

    # --- what vLLM's scheduler reports, within a step -------------------------------------------

    def admitted(self, request_id: str, account: RequestAccount) -> None:
        self._legs.note_admission(request_id, account, time.monotonic())
        self._deliver_updates()  # before the model runs: if it dies, the admission is known

    def scheduled(self, counts: Mapping[str, int], preempted: Collection[str]) -> None:
        self._positions = sum(counts.values())
        self._requests = len(counts)
        self._legs.note_step(counts, preempted, self._counts)

    def _counts(self, request_id: str) -> RequestAccount:
        return self._opened.account(request_id, saves=False)

    def left(self, request_id: str, account: RequestAccount) -> None:
        self._legs.note_left(request_id, account)

    # --- one step -------------------------------------------------------------------------------

    @property
    def _opened(self) -> SteppedCore:
        assert self._core is not None
        return self._core

    def _step(self) -> bool:
        core = self._core
        if core is None or not core.busy:
            return False
        self._positions = 0
        begun = time.monotonic()
        outputs = core.step()
        if self._positions:
            self._steps += 1
            self._options.on_step(time.monotonic() - begun, self._requests, self._positions)
        now = time.monotonic()
        for output in outputs:
            self._take(output, now)
        self._end_legs()
        if self._options.audit_steps and (findings := self._audit()):
            raise RuntimeError(f"the accounting is broken: {findings}")
        if not self._positions:
            self._wake.wait(POLL_SECONDS)
        return True

    def _take(self, output: CoreOutput, now: float) -> None:
        leg = self._legs.find(output.request_id)
        if leg is None or leg.finished:
            return
        sampled = output.sampled
        if sampled.error is not None:
            self._fail(leg, sampled.error)
            return
        self._legs.note_token(leg, now)
        finish = leg.finish_at(sampled.token)
        try:
            stops = leg.stop_checker is not None and leg.stop_checker.stops_at(sampled.token)
        except Exception:  # noqa: BLE001 - the edge of one request: it ends that one
            self._fail(leg, Unavailable("the output cannot be decoded to check for stop strings"))
            return
        if stops:
            finish = finish or Finish.STOP
        self._legs.queue_update(leg.id, Token(sampled, finish))
        if finish is not None or leg.order.prefill_only or output.last:
            self._legs.finish(leg, finish)
            if not output.last:
                self._opened.abort(leg.id)

    def _end_legs(self) -> None:
        for leg in self._legs.ended():
            self._legs.send_account(leg, self._opened.account)

    # --- requests -------------------------------------------------------------------------------

    def _submit(self, leg: VllmLeg) -> None:
        limit = self._options.max_waiting
        assert self._limits is not None
        try:
            if self._opened.load().waiting >= limit:
                raise Exhausted(f"{limit} requests are waiting here", retry_after=1.0)
            self._limits.check(leg.order)
            self._opened.add(leg.order, leg.sampling, leg.grammar)
        except KvrelayError as error:
            self._legs.queue_update(leg.id, Failed(error))
        else:
            self._legs.add(leg)

    def _abort(self, request_id: str) -> None:
        leg = self._legs.find(request_id)
        if leg is not None:
            self._drop(leg)
            self._opened.abort(request_id)

    def _fail(self, leg: VllmLeg, error: KvrelayError) -> None:
        self._legs.queue_update(leg.id, Failed(error))
        self._abort(leg.id)

    def _fail_all(self, reason: str) -> None:
        for leg in self._legs.open:
            self._legs.queue_update(leg.id, Failed(Unavailable(reason)))
            self._drop(leg)

    def _drop(self, leg: VllmLeg) -> None:
        account_of = self._counts if leg.trace is None else self._opened.account
        self._legs.drop(leg, account_of, time.monotonic())

    def _fail_step(self, error: Exception) -> None:
        """vLLM's scheduler cannot take back a step: this process must be replaced."""
        raise error

    # --- measures -------------------------------------------------------------------------------

    def _audit(self) -> list[Finding]:
        return [*self._opened.audit(), *self._legs.audit(self._counts)]

    def _publish(self) -> None:
        self._load = self._measure()
        self._deliver_updates()

    def _deliver_updates(self) -> None:
        updates: Sequence[tuple[str, Update]] = self._legs.take_updates()
        if updates:
            self._deliver(updates)

    def _measure(self) -> EngineLoad:
        core, limits = self._core, self._limits
        load = CoreLoad(0, 0, 0, 0, 0, 0) if core is None else core.load()
        blocks = 0 if limits is None else limits.num_blocks
        return EngineLoad(
            waiting=load.waiting,
            waiting_tokens=load.waiting_tokens,
            loading=load.loading,
            running=load.running,
            saving=load.saving,
            free_blocks=load.free_blocks,
            held_blocks=blocks - load.free_blocks,
            steps=self._steps,
            executed=self._legs.totals.executed,
            late_events=0,
            totals=self._legs.totals,
        )
