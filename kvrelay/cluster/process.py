"""One supervised process: started in a group of its own, its lines passed on, restarted if it dies.

A thread keeps it: start, wait for the end, wait out the backoff, start again on the same port.
Whatever was started before the last ``end`` is gone when ``join`` returns.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvrelay.cluster.spawn import RunningProcess, forked, fresh, signal_group

log = logging.getLogger(__name__)
TAIL_LINES = 40
LONGEST_LINE = 1 << 16
PUMP_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to run: ``python -m module *args``, serving at ``host:port``."""

    role: str
    index: int
    module: str
    args: tuple[str, ...]
    host: str
    port: int
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)  # there are secrets in it
    forked: bool = False  # see ``spawn``

    @property
    def name(self) -> str:
        return self.role if self.role in ("store", "router") else f"{self.role}-{self.index}"

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RestartBackoff:
    """Waits between restarts: ``first``, doubled up to ``longest``, at most ``tries`` in a row.

    A process that lived for ``settled`` seconds begins at ``first`` again.
    """

    first: float = 0.5
    longest: float = 30.0
    tries: int = 8
    settled: float = 60.0

    def wait(self, deaths: int) -> float:
        return min(self.first * 2.0 ** (deaths - 1), self.longest)


class SupervisedProcess:
    """Keeps one ``ProcessSpec`` alive; its threads call ``on_line`` and ``on_change``."""

    def __init__(
        self,
        spec: ProcessSpec,
        on_line: Callable[[ProcessSpec, str], None],
        on_change: Callable[[ProcessSpec, str], None],
        backoff: RestartBackoff | None,
    ) -> None:
        self.spec = spec
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.dead = threading.Event()  # it is down and will not be started again
        self.served = threading.Event()  # set by whoever has seen it serve; no restart before
        self.starts = 0
        self._on_line = on_line
        self._on_change = on_change
        self._backoff = backoff
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._running: RunningProcess | None = None  # from the start until just before it is reaped
        self._started = 0.0
        self._thread = threading.Thread(target=self._keep, name=spec.name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Of the running process; ``None`` between two of them."""
        running = self._running
        return None if running is None else running.pid

    def send(self, number: int) -> bool:
        """A signal to the process and its group; whether there was one."""
        with self._lock:
            if (pid := self.pid) is None:
                return False
            signal_group(pid, number)
            return True

    def end(self, number: int = signal.SIGTERM) -> None:
        """Asks it to end, for good. A stopped process is continued so that it can."""
        with self._lock:  # either it was started before and is told, or never will be
            self._stopping.set()
            if self._running is not None:
                self._running.cancel()
        self.send(number)
        self.send(signal.SIGCONT)

    def join(self, timeout: float) -> bool:
        """Whether it is gone within ``timeout`` seconds after ``end``."""
        if self._thread.ident is None:
            return True
        self._thread.join(max(timeout, 0.0))
        return not self._thread.is_alive()

    def _keep(self) -> None:
        deaths = 0
        try:
            while (status := self._run_once()) is not None:
                lived = time.monotonic() - self._started
                settled = self._backoff is not None and lived >= self._backoff.settled
                deaths = 1 if settled else deaths + 1
                if self._stopping.is_set() or not self._again(status, deaths):
                    break
        finally:
            self.dead.set()

    def _again(self, status: int, deaths: int) -> bool:
        """Waits out the backoff; whether to start again."""
        how = describe(status)
        if not self.served.is_set():
            self._on_change(self.spec, f"{how} before it served")
            return False
        if self._backoff is None or deaths > self._backoff.tries:
            more = "" if self._backoff is None else f" {deaths} times in a row; not started again"
            self._on_change(self.spec, f"{how}{more}")
            return False
        wait = self._backoff.wait(deaths)
        self._on_change(self.spec, f"{how}; starting it again in {wait:g} s")
        return not self._stopping.wait(wait)

    def _run_once(self) -> int | None:
        """Starts it and waits for its end; ``None`` when it may not be started any more."""
        with self._lock:
            if self._stopping.is_set():
                return None
            start = forked if self.spec.forked else fresh
            running = start(self.spec.module, self.spec.args, self.spec.environ)
            self._running = running
            self._started = time.monotonic()
            self.starts += 1
        if not running.born():
            return running.wait(self._ended)
        if self.starts > 1:
            self._on_change(self.spec, f"started again as process {running.pid}")
        pump = threading.Thread(target=self._pump, args=(running,), daemon=True)
        pump.start()
        status = running.wait(self._ended)
        pump.join(PUMP_SECONDS)
        return status

    def _ended(self) -> None:
        """Called when it has ended and its number is still its own: no signals from now on."""
        with self._lock:
            self._running = None

    def _pump(self, running: RunningProcess) -> None:
        with running.output as stream:
            for raw in iter(lambda: stream.readline(LONGEST_LINE), b""):
                line = raw.decode(errors="replace").rstrip()
                self.tail.append(line)
                self._on_line(self.spec, line)


def describe(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
