"""A cluster of processes on this machine: start, wait for health, restart what dies, stop all.

    with Cluster(ClusterConfig(prefill=2, decode=2, port=0)) as cluster:
        client = Client(cluster.router)
        cluster.kill("decode", 0)          # SIGKILL; it is started again on the same port

Leaving the block ends every process and waits for it; see ``child`` for what happens when this
process itself is killed.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TypeVar

from kvrelay.cluster.layout import ClusterConfig, specs
from kvrelay.cluster.ports import ReservedPorts
from kvrelay.cluster.process import ProcessSpec, RestartBackoff, SupervisedProcess
from kvrelay.cluster.readiness import ReadinessProbe
from kvrelay.errors import DeadlineExceeded, KvrelayError, NotFound, Unavailable
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.credentials import ADMIN_FIRST
from kvrelay.v1 import router_pb2
from kvstore.urls import public_urls

C = TypeVar("C", bound=ClusterConfig)
START_SECONDS = 120.0
STOP_SECONDS = 12.0  # a little more than a worker gives the requests under way
KILL_SECONDS = 5.0  # to be gone after SIGKILL
TAIL_SHOWN = 12


class StartInterrupted(KvrelayError):
    """The cluster was told to stop while it started."""


def _ignore_line(spec: ProcessSpec, line: str) -> None:
    """Keeps lines only in the tail of their process."""


def _ignore_change(spec: ProcessSpec, what: str) -> None:
    """Says nothing."""


def with_fleet_key(config: C) -> C:
    """With a key for the hand-offs of this cluster, drawn if none is given."""
    return config if config.fleet_key else replace(config, fleet_key=secrets.token_hex(32))


class Cluster:
    """Every process of one ``ClusterConfig``; a context manager."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        on_line: Callable[[ProcessSpec, str], None] = _ignore_line,
        on_change: Callable[[ProcessSpec, str], None] = _ignore_change,
        backoff: RestartBackoff | None = RestartBackoff(),  # noqa: B008 a frozen value
        layout: Callable[[ClusterConfig], tuple[ProcessSpec, ...]] = specs,
    ) -> None:
        self.config = config = with_fleet_key(config)
        self.security = policy.load(config, ADMIN_FIRST)
        self.specs = layout(config)
        self._on_change = on_change
        self._processes = {
            (spec.role, spec.index): SupervisedProcess(spec, on_line, on_change, backoff)
            for spec in self.specs
        }
        self.view = router_pb2.ListWorkersResponse()  # what the router knew when all was ready
        self._held: ReservedPorts | None = None
        self._stopping = False

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def router(self) -> str:
        """Address of the front door."""
        return self.addresses("router")[0]

    @property
    def store(self) -> str:
        """URL of the store."""
        own = self.addresses("store")
        return self.config.store or (f"kvrelay://{own[0]}" if own else "")

    def addresses(self, role: str) -> tuple[str, ...]:
        """Of every process in this role, by index."""
        return tuple(spec.address for spec in self.specs if spec.role == role)

    def process(self, role: str, index: int = 0) -> SupervisedProcess:
        """The keeper of one process: its pid, its last lines, how often it was started."""
        try:
            return self._processes[role, index]
        except KeyError:
            names = ", ".join(spec.name for spec in self.specs)
            raise NotFound(f"no process {role} {index}; there are {names}") from None

    def named(self, name: str) -> SupervisedProcess:
        """The same by the name shown in the table, such as ``decode-1``."""
        found = [p for p in self._processes.values() if p.spec.name == name]
        if not found:
            raise NotFound(f"no process {name!r}")
        return found[0]

    def kill(self, role: str, index: int = 0, number: int = signal.SIGKILL) -> None:
        """Sends a signal: SIGKILL to see it restarted, SIGSTOP and SIGCONT to play dead."""
        if not self.process(role, index).send(number):
            raise Unavailable(f"{role} {index} is not running now")

    def start(self, timeout: float = START_SECONDS) -> None:
        """Starts everything at once and returns when all of it serves."""
        self._held = ReservedPorts((spec.host, spec.port) for spec in self.specs)
        for process in self._processes.values():
            process.start()
        self.view = self.wait(timeout)

    def wait(self, timeout: float = START_SECONDS) -> router_pb2.ListWorkersResponse:
        """Returns the router's view once every process serves and the router uses every worker.

        ``Unavailable`` with its last lines if a process ended for good, or before it ever served;
        ``DeadlineExceeded`` naming what is not ready; ``StartInterrupted`` after ``interrupt``.
        """
        deadline = time.monotonic() + timeout
        with ReadinessProbe(self.specs, self._on_change, self.security) as prober:
            while not prober.done():
                self._check(prober)
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(f"after {timeout:g} s not ready: {prober.missing()}")
                prober.step(min(0.25, max(deadline - time.monotonic(), 0.01)))
            self._check(prober)
            return prober.workers()

    def _check(self, prober: ReadinessProbe) -> None:
        if self._stopping:
            raise StartInterrupted("told to stop while starting")
        for (role, index), process in self._processes.items():
            if prober.served(role, index):
                process.served.set()
            if process.dead.is_set():
                when = "for good" if process.served.is_set() else "before it served"
                lines = "".join(f"\n  | {line}" for line in list(process.tail)[-TAIL_SHOWN:])
                raise Unavailable(f"{process.spec.name} ended {when}{lines}")

    def interrupt(self) -> None:
        """Makes a ``wait`` under way end."""
        self._stopping = True

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Ends everything: SIGTERM, and SIGKILL for what is left after ``timeout`` seconds."""
        self._stopping = True
        for process in self._processes.values():
            process.end()
        for process in self._left(timeout):
            self._on_change(process.spec, f"did not end within {timeout:g} s; killed")
        self.kill_all()
        if self._held is not None:
            self._held.close()

    def kill_all(self) -> None:
        """SIGKILL to everything, at once; nothing of it is left when this returns."""
        self._stopping = True
        for process in self._processes.values():
            process.end(signal.SIGKILL)
        self._left(KILL_SECONDS)

    def _left(self, timeout: float) -> list[SupervisedProcess]:
        """Those that have not ended within so many seconds."""
        deadline = time.monotonic() + timeout
        return [p for p in self._processes.values() if not p.join(deadline - time.monotonic())]

    def describe(self) -> dict[str, object]:
        """What an endpoints file says."""
        return {
            "router": self.router,
            "store": public_urls(self.store),
            "prefill": list(self.addresses("prefill")),
            "decode": list(self.addresses("decode")),
            "model": self.config.model_path,
            "processes": [
                {
                    "role": spec.role,
                    "index": spec.index,
                    "address": spec.address,
                    "pid": self.process(spec.role, spec.index).pid,
                }
                for spec in self.specs
            ],
        }
