"""``kvrelay up``: a cluster on this machine, served until Ctrl-C."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvrelay.cli.screen import paint, print_err, print_out, table
from kvrelay.cli.signals import Signals, end_now
from kvrelay.cluster import endpoints
from kvrelay.cluster.layout import ClusterConfig
from kvrelay.cluster.process import ProcessSpec
from kvrelay.cluster.supervisor import Cluster, StartInterrupted, with_cluster_token
from kvrelay.config.reader import load, option
from kvrelay.connector.script import PREFIX, read_script
from kvrelay.installation import command
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.credentials import ADMIN_FIRST
from kvrelay.v1 import router_pb2
from kvstore import connect

COLOURS = {"store": "magenta", "prefill": "cyan", "decode": "green", "router": "blue"}
DESCRIPTION = """\
Starts a store, prefill workers, decode workers and a router as processes of their own, waits
until all of them serve, and restarts a process that dies, however often. Ctrl-C ends the cluster
(status 1 if a process kept dying); a second Ctrl-C ends it at once."""
EPILOG = """\
examples:
  kvrelay up                                    the shipped model, one worker of each role
  kvrelay up --model DIR --prefill 2 --decode 2 --dtype bfloat16
  kvrelay up --endpoints up.json & kvrelay generate --endpoints up.json "Hello"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig(ClusterConfig):
    """The cluster, and what to print about it."""

    endpoints: str | None = option(
        None, "write addresses and process ids to this file, as JSON", metavar="FILE"
    )
    start_timeout: float = option(120.0, "time limit of the start", unit="seconds", low=1)
    quiet: bool = option(False, "do not show the logs of the processes")


def main(argv: Sequence[str]) -> int:
    config = load(UpConfig, argv, "kvrelay up", DESCRIPTION, epilog=EPILOG)
    _check(config)
    run = Up(config)
    with Signals(run.on_signal):
        return run.serve()


def _check(config: UpConfig) -> None:
    """``Rejected`` for settings that would make a process fail; none has been started yet."""
    if config.endpoints:
        endpoints.check_writable(Path(config.endpoints).absolute())
    if config.store is not None:
        policy.install(config, ADMIN_FIRST)
        _check_store(config.store)


def _check_store(url: str) -> None:
    """Open the store's URL as a worker does, without a call to the store."""
    if not url.startswith(PREFIX):
        connect(url).close()
    elif (inner := read_script(url).store) is not None:
        _check_store(inner)


class Up:
    """One run of the command: the cluster, its signals and its endpoints file."""

    def __init__(self, config: UpConfig) -> None:
        self._config = config
        named = Path(config.endpoints).absolute() if config.endpoints else None
        self._files = [file for file in (named, endpoints.own_file()) if file is not None]
        self._ended = threading.Event()
        self._status = 0  # exit status of an interrupted start
        self._failing: dict[str, str] = {}  # processes that kept dying until the end
        self._up = False
        self._lock = threading.Lock()  # for lines of many threads
        self.cluster = Cluster(
            with_cluster_token(config), on_line=self._show_line, on_change=self._show_change
        )

    def serve(self) -> int:
        print_err(f"Starting {self._config.model_path}")
        try:
            self.cluster.start(self._config.start_timeout)
            print_out(describe(self.cluster, self.cluster.view))
            self._up = True
            print_out(f"\nServing on {paint(self.cluster.router, 'bold')}; Ctrl-C ends it. Try:")
            where = f"--router {self.cluster.router}{self._access()}"
            print_out(f"  {command('generate')} {where} {self._example()}")
            self._publish()
            self._ended.wait()
            self._failing = self.cluster.failing()
            for name, how in self._failing.items():
                print_err(f"{paint(f'{name:>9}', 'bold', sys.stderr)} {how}")
        except StartInterrupted:
            return self._status
        finally:
            print_err("Stopping")
            self.cluster.stop()
            self._remove_files()
        return 1 if self._failing else 0

    def on_signal(self, number: int) -> None:
        """End in order at the first signal, at once at the second."""
        if self._ended.is_set():
            self._remove_files()
            end_now(self.cluster, number)
        self._status = 128 + number
        self.cluster.interrupt()
        self._ended.set()

    def _example(self) -> str:
        """A prompt that the model can answer; the shipped one recalls its system message."""
        if self._config.model != "recall":
            return '"Once upon a time"'
        fact = "The copper mask stands in Boston."
        return f'--chat --temperature 0 --system "{fact}" "Where is the copper mask?"'

    def _access(self) -> str:
        """The flags that a client on this machine needs."""
        named = ("tls_cert", "tls_key", "tls_ca", "credentials")
        given = [(name, getattr(self._config, name)) for name in named]
        return "".join(f" --{name.replace('_', '-')} {path}" for name, path in given if path)

    def _publish(self) -> None:
        for file in () if self._ended.is_set() else self._files:
            endpoints.write(file, self.cluster.describe())

    def _remove_files(self) -> None:
        for file in self._files:
            endpoints.remove(file)

    def _show_line(self, spec: ProcessSpec, line: str) -> None:
        if not self._config.quiet:
            self._print(f"{paint(f'{spec.name:>9} |', COLOURS[spec.role], sys.stderr)} {line}")

    def _show_change(self, spec: ProcessSpec, what: str) -> None:
        self._print(f"{paint(f'{spec.name:>9}', 'bold', sys.stderr)} {what}")
        if self._up:
            self._publish()  # a process id may have changed

    def _print(self, line: str) -> None:
        """Print a line, from any thread. A closed terminal stops no thread."""
        with self._lock, suppress(BrokenPipeError):
            print_err(line)


def describe(cluster: Cluster, view: router_pb2.ListWorkersResponse) -> str:
    """The table of the processes of a running cluster."""
    infos = {worker.address: worker.info for worker in view.workers}
    rows = []
    for spec in cluster.specs:
        info = infos.get(spec.address)
        pid = cluster.process(spec.role, spec.index).pid
        model = info.namespace.model if info else "-"
        digest = info.namespace.digest.hex()[:8] if info else "-"
        attention = info.attention_backend if info else "-"
        rows.append((spec.name, spec.address, str(pid or "-"), Path(model).name, digest, attention))
    head = ("process", "address", "pid", "model", "namespace", "attention")
    return "\n" + table(head, rows, frozenset({2}))
