"""The engine of a worker: one thread that takes step after step and tells what happened.

All accounting is touched by this thread alone. Other threads hand it orders and get updates
through ``deliver``, called once a step on the engine's thread with everything that is new.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

from kvrelay.engine.core.audit import Finding
from kvrelay.engine.core.external import Connector
from kvrelay.engine.core.plan import EngineLimits
from kvrelay.engine.core.request import Naming, Order
from kvrelay.engine.core.task import StopChecker
from kvrelay.engine.core.updates import Update
from kvrelay.engine.steps import EngineLoad, ModelRunner, Steps
from kvrelay.engine.watchdog import Watchdog, stack_of
from kvrelay.errors import Unavailable
from kvrelay.sampling import Sampling

log = logging.getLogger(__name__)

Deliver = Callable[[Sequence[tuple[str, Update]]], None]
T = TypeVar("T")
IDLE_SECONDS = 1.0  # everything that is new wakes the thread; this is for what nobody told


class Engine:
    """Serves requests until closed. With ``audit_steps`` a step that breaks an invariant fails.

    ``on_fatal`` is called when the engine is lost, which it is too when a step does not end within
    ``step_seconds``: the process should end and be started again.
    """

    def __init__(
        self,
        runner: ModelRunner,
        limits: EngineLimits,
        naming: Naming,
        connector: Connector,
        deliver: Deliver,
        max_waiting: int = 1024,
        audit_steps: bool = False,
        on_fatal: Callable[[], None] = lambda: None,
        journal: Callable[[str], object] | None = None,
        step_seconds: float = 120.0,
    ) -> None:
        self._steps = Steps(runner, limits, naming, connector, max_waiting, journal)
        self._load = self._steps.measure()
        self._connector = connector
        self._deliver = deliver
        self._audit_steps = audit_steps
        self._on_fatal = on_fatal
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._turns = 0
        self._busy = False
        self._watchdog = Watchdog(step_seconds, self._at, self._hangs)

    def start(self) -> None:
        """Start the engine's thread and the connector's."""
        self._connector.start(self._wake.set)
        self._thread.start()
        self._watchdog.start()

    def submit(
        self, order: Order, sampling: Sampling, stop_text: StopChecker | None = None
    ) -> None:
        """Queue a request; what becomes of it is told through ``deliver``, under its id."""
        if self._closing.is_set():
            raise Unavailable("the worker is stopping")
        self._post(lambda: self._steps.submit(order, sampling, stop_text))

    def abort(self, request_id: str) -> None:
        """End a request; nothing more is told about it. Unknown ones are no error."""
        self._post(lambda: self._steps.abort(request_id))

    def load(self) -> EngineLoad:
        """The load as it was after the last step, without waiting for the thread."""
        return self._load

    def audit(self) -> Future[list[Finding]]:
        """Check the invariants between two steps."""
        return self._call(self._steps.audit)

    def close(self, timeout: float = 10.0) -> None:
        """Stop; open requests fail as unavailable."""
        self._closing.set()
        self._watchdog.end()
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

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn()
            self._run_commands()
        except Exception as error:  # noqa: BLE001 - the edge: nothing here can be trusted now
            self._give_up(error)
        finally:
            self._steps.fail_all("the worker is stopping")
            self._publish()

    def _turn(self) -> None:
        self._turns = self._turns + 1
        self._busy = True
        try:
            busy = self._step()
        except Exception as error:  # noqa: BLE001 - the edge: it ends the requests of the step
            self._steps.fail_step(error)  # if not even that goes, the accounting is lost
            busy = True
        self._publish()
        self._busy = False
        if not busy:
            self._wake.wait(IDLE_SECONDS)
        self._wake.clear()

    def _step(self) -> bool:
        self._run_commands()
        busy = self._steps.step()
        if self._audit_steps and (findings := self._steps.audit()):
            raise RuntimeError(f"the accounting is broken: {findings}")
        return busy

    def _give_up(self, error: Exception) -> None:
        log.critical("the engine cannot go on", exc_info=error)
        self._closing.set()
        self._on_fatal()

    def _at(self) -> int | None:
        return self._turns if self._busy else None

    def _hangs(self) -> None:
        log.critical("the engine hangs in a step:\n%s", stack_of(self._thread))
        self._closing.set()
        self._on_fatal()

    def _run_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _publish(self) -> None:
        self._load = self._steps.measure()
        updates = self._steps.take_updates()
        if updates:
            self._deliver(updates)
