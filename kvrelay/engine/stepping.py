"""The thread of an engine: it runs posted commands and takes step after step.

Other threads post commands and get the updates of a step through the engine's ``deliver``. A step
that raises ends its requests; one that hangs, loses the device or breaks the accounting ends the
process.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

from kvrelay.engine.watchdog import Watchdog, stack_of

log = logging.getLogger(__name__)

T = TypeVar("T")
IDLE_SECONDS = 1.0  # commands and events wake the thread; this covers a missed wake-up


class DeviceLost(Exception):
    """The accelerator reports an error after which this process cannot use it any more."""


class SteppingThread(ABC):
    """Calls ``on_fatal`` if it cannot continue, or if a step takes longer than ``step_seconds``.

    ``on_rest`` is called when there is nothing to compute.
    """

    def __init__(
        self,
        step_seconds: float,
        on_fatal: Callable[[], None],
        on_rest: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_fatal = on_fatal
        self._on_rest = on_rest
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._turns = 0
        self._in_turn = False
        self._watchdog = Watchdog(step_seconds, self._turn_under_way, self._hangs)

    @abstractmethod
    def _step(self) -> bool:
        """Take one step; whether there was anything to compute."""

    @abstractmethod
    def _fail_step(self, error: Exception) -> None:
        """End the requests of the step that raised. Raises if the accounting is lost."""

    @abstractmethod
    def _fail_all(self, reason: str) -> None:
        """End all requests as unavailable."""

    @abstractmethod
    def _publish(self) -> None:
        """Show the load after a step, and deliver its updates."""

    def _leave(self) -> None:
        """Free what only this thread may free; nothing is called after it."""
        return

    def turn(self) -> bool:
        """Run the posted commands and one step, and deliver its updates.

        The thread calls it until the engine is closed; without that thread, a caller may. Returns
        whether there was anything to compute. Raises if the accounting or the device is lost.
        """
        self._turns += 1
        self._in_turn = True
        try:
            self._run_commands()
            busy = self._step()
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 - the edge: it ends the requests of the step
            self._fail_step(error)
            busy = True
        self._publish()
        self._in_turn = False
        return busy

    def _end(self, timeout: float) -> None:
        """Stop the thread; open requests fail as unavailable."""
        self._closing.set()
        self._watchdog.end()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                if not self.turn():
                    self._on_rest()
                    self._wake.wait(IDLE_SECONDS)
                self._wake.clear()
            self._run_commands()
        except Exception as error:  # noqa: BLE001 - the edge: nothing here can be trusted now
            self._give_up(error)
        finally:
            try:
                self._on_rest()
                self._fail_all("the worker is stopping")
                self._publish()
            finally:
                self._leave()

    def _give_up(self, error: Exception) -> None:
        log.critical("the engine cannot continue", exc_info=error)
        self._lose()

    def _turn_under_way(self) -> int | None:
        return self._turns if self._in_turn else None

    def _hangs(self) -> None:
        log.critical("the engine hangs in a step:\n%s", stack_of(self._thread))
        self._lose()

    def _lose(self) -> None:
        self._closing.set()
        self._on_fatal()

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._wake.set()

    def _call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function on the thread, between two steps."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - the future hands it to the caller
                future.set_exception(error)

        self._post(command)
        return future

    def _run_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()
