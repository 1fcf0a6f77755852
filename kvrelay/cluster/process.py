"""One supervised process: its own process group, its lines passed on, restarted when it dies.

A thread runs the cycle: start, wait for the end, wait out the backoff, start on the same port.
After ``end``, no process of the group is left when ``join`` returns true.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvrelay.cluster.ports import WantedPort
from kvrelay.cluster.spawn import RunningProcess, signal_group, start_forked, start_fresh
from kvrelay.rpc.address import Address

log = logging.getLogger(__name__)
TAIL_LINES = 40
MAX_LINE = 1 << 16
PUMP_SECONDS = 2.0
FAILING_DEATHS = 3  # in a row: the process keeps dying


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to run: ``python -m module *args``, serving at ``host:port``.

    ``python`` is the interpreter, by default that of this process.
    """

    role: str
    index: int
    module: str
    args: tuple[str, ...]
    host: str
    port: int
    http_port: int | None = None  # where it also serves HTTP
    other_ports: tuple[WantedPort, ...] = ()  # where it listens for anything else
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)  # holds secrets
    forked: bool = False  # see ``spawn``
    python: str | None = None

    @property
    def name(self) -> str:
        return self.role if self.role in ("store", "router") else f"{self.role}-{self.index}"

    @property
    def address(self) -> str:
        return str(Address(self.host, self.port))


@dataclass(frozen=True, slots=True)
class RestartBackoff:
    """Waits between restarts: ``first``, doubled up to ``longest``.

    A process that has run for ``settled`` seconds starts at ``first`` again.
    """

    first: float = 0.5
    longest: float = 30.0
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
        self.dead = threading.Event()  # it ended and will not be restarted
        self.served = threading.Event()  # set once it was seen serving; no restart before
        self.starts = 0
        self._deaths = 0  # in a row, each before the process had settled
        self._last_end = ""
        self._on_line = on_line
        self._on_change = on_change
        self._backoff = backoff
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._running: RunningProcess | None = None  # from the start until just before it is reaped
        self._thread = threading.Thread(target=self._supervise, name=spec.name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The process id; ``None`` between two runs."""
        running = self._running
        return None if running is None else running.pid

    @property
    def failing(self) -> str | None:
        """How the process ended, if it keeps dying; ``None`` once a run has settled."""
        if self._deaths < FAILING_DEATHS:
            return None
        return f"{self._last_end}, {self._deaths} times in a row"

    def send(self, number: int) -> bool:
        """Send a signal to the process and its group; false if it does not run."""
        with self._lock:
            if (pid := self.pid) is None:
                return False
            signal_group(pid, number)
            return True

    def end(self, number: int = signal.SIGTERM) -> None:
        """Signal the process to end, and do not restart it. A stopped process is continued."""
        with self._lock:  # after this no process is started, and a started one gets the signal
            self._stopping.set()
            if self._running is not None:
                self._running.cancel_start()
        self.send(number)
        self.send(signal.SIGCONT)

    def join(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds after ``end``. Returns whether the process has ended."""
        if self._thread.ident is None:
            return True
        self._thread.join(max(timeout, 0.0))
        return not self._thread.is_alive()

    def _supervise(self) -> None:
        try:
            while (status := self._run_once()) is not None:
                self._last_end = describe(status)
                self._deaths += 1
                if self._stopping.is_set() or not self._should_restart():
                    break
        finally:
            self.dead.set()

    def _should_restart(self) -> bool:
        """Wait out the backoff. Returns whether to restart."""
        if not self.served.is_set():
            self._on_change(self.spec, f"{self._last_end} before it served")
            return False
        if self._backoff is None:
            self._on_change(self.spec, self._last_end)
            return False
        wait = self._backoff.wait(self._deaths)
        self._on_change(self.spec, f"{self.failing or self._last_end}; restarting in {wait:g} s")
        return not self._stopping.wait(wait)

    def _settle(self) -> None:
        """The current run has settled."""
        if self._deaths:
            self._deaths = 0
            self._on_change(self.spec, "runs again")

    def _run_once(self) -> int | None:
        """Start the process and wait for its end. Returns its status, ``None`` after ``end``."""
        with self._lock:
            if self._stopping.is_set():
                return None
            running = _start(self.spec)
            self._running = running
            self.starts += 1
        if not running.wait_started():
            return running.wait(self._ended)
        if self.starts > 1:
            self._on_change(self.spec, f"restarted as process {running.pid}")
        pump = threading.Thread(target=self._pump, args=(running,), daemon=True)
        pump.start()
        settled = threading.Timer((self._backoff or RestartBackoff()).settled, self._settle)
        settled.daemon = True
        settled.start()
        status = running.wait(self._ended)
        settled.cancel()
        pump.join(PUMP_SECONDS)
        return status

    def _ended(self) -> None:
        """The process is about to be reaped: its id, which may be used anew, gets no signal now."""
        with self._lock:
            self._running = None

    def _pump(self, running: RunningProcess) -> None:
        with running.output as stream:
            for raw in iter(lambda: stream.readline(MAX_LINE), b""):
                line = raw.decode(errors="replace").rstrip()
                self.tail.append(line)
                self._on_line(self.spec, line)


def _start(spec: ProcessSpec) -> RunningProcess:
    if spec.forked:
        return start_forked(spec.module, spec.args, spec.environ)
    return start_fresh(spec.module, spec.args, spec.environ, spec.python or sys.executable)


def describe(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
