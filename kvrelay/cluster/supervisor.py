"""A cluster of processes on this machine: start, wait for health, restart after a death, stop.

    with Cluster(ClusterConfig(prefill=2, decode=2, port=0)) as cluster:
        client = Client(cluster.router)
        cluster.kill("decode", 0)          # SIGKILL; it is restarted on the same port

Leaving the block ends every process and waits for it; ``child`` handles the case that this process
itself is killed.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from types import TracebackType

from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.fleet_key import kept_key
from kvrelay.cluster.layout import WORKERS, process_specs, shares_cores
from kvrelay.cluster.ports import ReservedPorts, WantedPort
from kvrelay.cluster.process import ProcessSpec, RestartBackoff, SupervisedProcess
from kvrelay.cluster.readiness import ReadinessProbe
from kvrelay.config.option import PREFIX
from kvrelay.errors import DeadlineExceeded, KvrelayError, NotFound, Unavailable
from kvrelay.process.shared_cores import SharedCoresFile
from kvrelay.process.tempdir import ensure_temporary_directory
from kvrelay.rpc import reserved
from kvrelay.rpc.address import Address
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.credentials import ADMIN_FIRST
from kvrelay.v1 import router_pb2
from kvstore.urls import public_urls

START_SECONDS = 120.0
STOP_SECONDS = 12.0  # a little more than a worker's default grace for open requests
STOP_MARGIN = 2.0
KILL_SECONDS = 5.0  # to end after SIGKILL
TAIL_SHOWN = 12
SHARED_CORES = PREFIX + "SHARED_CORES"


class StartInterrupted(KvrelayError):
    """The cluster was stopped while it started."""


def _ignore(spec: ProcessSpec, text: str) -> None:
    """The default for lines and changes; the last lines stay in the tail of their process."""


def with_fleet_key(config: ClusterConfig) -> ClusterConfig:
    """The configuration with a key that signs handoffs and blocks.

    A cluster whose blocks outlive it uses the key that this user keeps; another draws its own.
    """
    if config.fleet_key:
        return config
    lasting = config.store is not None or config.store_disk is not None
    return replace(config, fleet_key=(kept_key() if lasting else None) or secrets.token_hex(32))


def with_cluster_token(config: ClusterConfig) -> ClusterConfig:
    """The configuration with a random token that all processes of the cluster require.

    One whose credentials already say who may call stays as it is.
    """
    if policy.load(config).credentials.required:
        return config
    return replace(config, cluster_token=secrets.token_urlsafe(32))


def wanted_ports(specs: Sequence[ProcessSpec]) -> Iterator[WantedPort]:
    """The ports of all processes, that of the HTTP API with the way out if it is taken."""
    for spec in specs:
        if spec.role == "router":
            instead = "take any free one with --port 0"
            yield WantedPort(spec.host, spec.port, instead=instead, public=True)
        else:
            yield WantedPort(spec.host, spec.port)
        if spec.http_port is not None:
            instead = "take any free one with --http-port 0, or none with --no-http"
            yield WantedPort(spec.host, spec.http_port, "http_port", instead, public=True)
        yield from spec.other_ports


def with_reserved_ports(specs: Sequence[ProcessSpec]) -> tuple[ProcessSpec, ...]:
    """The processes, each with the names of the ports that are reserved for all of them."""
    ports = [Address(wanted.host, wanted.port) for wanted in wanted_ports(specs)]
    named = reserved.variable(ports)
    return tuple(replace(spec, environ={**spec.environ, **named}) for spec in specs)


def with_shared_cores(specs: Sequence[ProcessSpec], path: str) -> tuple[ProcessSpec, ...]:
    """The processes; workers for which the environment names no other file share cores by it."""
    named = {SHARED_CORES: path}
    return tuple(
        replace(spec, environ={**named, **spec.environ}) if spec.role in WORKERS else spec
        for spec in specs
    )


class Cluster:
    """Every process of one ``ClusterConfig``; a context manager."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        on_line: Callable[[ProcessSpec, str], None] = _ignore,
        on_change: Callable[[ProcessSpec, str], None] = _ignore,
        backoff: RestartBackoff | None = RestartBackoff(),  # noqa: B008 a frozen value
        layout: Callable[[ClusterConfig], tuple[ProcessSpec, ...]] = process_specs,
    ) -> None:
        self.config = config = with_fleet_key(config)
        self.security = policy.load(config, ADMIN_FIRST)
        ensure_temporary_directory()
        specs = layout(config)
        self._cores = SharedCoresFile() if shares_cores(config) else None
        if self._cores is not None and self._cores.path is not None:
            specs = with_shared_cores(specs, self._cores.path)
        self.specs = with_reserved_ports(specs)
        self._on_change = on_change
        self._processes = {
            (spec.role, spec.index): SupervisedProcess(spec, on_line, on_change, backoff)
            for spec in self.specs
        }
        self.view = router_pb2.ListWorkersResponse()  # the router's view when the cluster was ready
        self._ports: ReservedPorts | None = None
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
        """Address of the router."""
        return self.addresses("router")[0]

    @property
    def http(self) -> str | None:
        """Base URL of the router's HTTP API, without a path; ``None`` if it serves none."""
        spec = self.process("router").spec
        if spec.http_port is None:
            return None
        scheme = "https" if self.security.tls is not None else "http"
        return f"{scheme}://{Address(spec.host, spec.http_port)}"

    @property
    def store(self) -> str:
        """URL of the store."""
        own = self.addresses("store")
        return self.config.store or (f"kvrelay://{own[0]}" if own else "")

    def addresses(self, role: str) -> tuple[str, ...]:
        """Address of every process of a role, by index."""
        return tuple(spec.address for spec in self.specs if spec.role == role)

    def process(self, role: str, index: int = 0) -> SupervisedProcess:
        """One process: its id, its last lines, the number of its starts."""
        try:
            return self._processes[role, index]
        except KeyError:
            names = ", ".join(spec.name for spec in self.specs)
            raise NotFound(f"no process {role} {index}; there are {names}") from None

    def named(self, name: str) -> SupervisedProcess:
        """One process by the name shown in the table, such as ``decode-1``."""
        for process in self._processes.values():
            if process.spec.name == name:
                return process
        raise NotFound(f"no process {name!r}")

    def failing(self) -> dict[str, str]:
        """The processes that keep dying, by name, and how the last one of each ended."""
        ends = {p.spec.name: p.failing for p in self._processes.values()}
        return {name: how for name, how in ends.items() if how is not None}

    def kill(self, role: str, index: int = 0, number: int = signal.SIGKILL) -> None:
        """Send a signal: SIGKILL to have it restarted, SIGSTOP and SIGCONT to simulate a hang."""
        if not self.process(role, index).send(number):
            raise Unavailable(f"{role} {index} is not running now")

    def start(self, timeout: float = START_SECONDS) -> None:
        """Start all processes at once; returns when every one serves."""
        self._ports = ReservedPorts(wanted_ports(self.specs))
        for process in self._processes.values():
            process.start()
        self.view = self.wait(timeout)

    def wait(self, timeout: float = START_SECONDS) -> router_pb2.ListWorkersResponse:
        """Returns the router's view once every process serves and the router uses every worker.

        Raises ``Unavailable`` with the last lines of a process that ended for good or before it
        served, ``DeadlineExceeded`` naming what is not ready, ``StartInterrupted`` after
        ``interrupt``.
        """
        deadline = time.monotonic() + timeout
        with closing(ReadinessProbe(self.specs, self._on_change, self.security)) as probe:
            while not probe.done():
                self._check(probe)
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(f"after {timeout:g} s not ready: {probe.missing()}")
                probe.step(min(0.25, max(deadline - time.monotonic(), 0.01)))
            self._check(probe)
            return probe.workers()

    def _check(self, probe: ReadinessProbe) -> None:
        if self._stopping:
            raise StartInterrupted("stopped while starting")
        for (role, index), process in self._processes.items():
            if probe.served(role, index):
                process.served.set()
            if process.dead.is_set():
                when = "for good" if process.served.is_set() else "before it served"
                lines = "".join(f"\n  | {line}" for line in list(process.tail)[-TAIL_SHOWN:])
                raise Unavailable(f"{process.spec.name} ended {when}{lines}")

    def interrupt(self) -> None:
        """End a running ``wait``."""
        self._stopping = True

    def stop(self, timeout: float | None = None) -> None:
        """End every process: SIGTERM, and SIGKILL after ``timeout`` seconds.

        By default a little more than the processes' grace for open requests.
        """
        if timeout is None:
            timeout = max(STOP_SECONDS, (self.config.grace or 0.0) + STOP_MARGIN)
        self._stopping = True
        for process in self._processes.values():
            process.end()
        for process in self._still_running(timeout):
            self._on_change(process.spec, f"did not end within {timeout:g} s; killed")
        self.kill_all()
        if self._ports is not None:
            self._ports.close()
        if self._cores is not None:
            self._cores.close()

    def kill_all(self) -> None:
        """Send SIGKILL to every process at once; none is left when this returns."""
        self._stopping = True
        for process in self._processes.values():
            process.end(signal.SIGKILL)
        self._still_running(KILL_SECONDS)

    def _still_running(self, timeout: float) -> list[SupervisedProcess]:
        """The processes that have not ended within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        return [p for p in self._processes.values() if not p.join(deadline - time.monotonic())]

    def describe(self) -> dict[str, object]:
        """The content of an endpoints file."""
        return {
            "pid": os.getpid(),
            "router": self.router,
            "http": self.http,
            "store": public_urls(self.store),
            "prefill": list(self.addresses("prefill")),
            "decode": list(self.addresses("decode")),
            "model": self.config.model_path,
            "token": self.config.cluster_token,
            "fleet_key": self.config.fleet_key if self.config.cluster_token else None,
            "processes": [
                {
                    "name": process.spec.name,
                    "role": role,
                    "index": index,
                    "address": process.spec.address,
                    "pid": process.pid,
                    "starts": process.starts,
                    "failing": process.failing,
                }
                for (role, index), process in self._processes.items()
            ],
        }
