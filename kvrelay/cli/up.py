"""``kvrelay up``: a cluster on this machine, served until Ctrl-C."""

from __future__ import annotations

import json
import logging
import shlex
import sys
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from kvrelay.cli.model_check import ModelCheck
from kvrelay.cli.screen import paint, print_err, print_out, table
from kvrelay.cli.signals import Signals, end_now
from kvrelay.cluster import endpoints
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.process import ProcessSpec
from kvrelay.cluster.supervisor import Cluster, StartInterrupted, with_cluster_token
from kvrelay.config.reader import load, option
from kvrelay.connector.script import PREFIX, read_script
from kvrelay.errors import DeadlineExceeded, KvrelayError, Rejected, Unavailable
from kvrelay.installation import command
from kvrelay.model_folder import check_model_folder
from kvrelay.process import logs
from kvrelay.process.memory import check_fits, host_memory
from kvrelay.rpc import tracing
from kvrelay.rpc.address import HTTP_PORT, Address
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.credentials import ADMIN_FIRST
from kvrelay.text.tokenizer import has_tokenizer
from kvrelay.v1 import router_pb2
from kvstore import connect

log = logging.getLogger(__name__)

CLIENT_FILE = "client.toml"
STORE_SECONDS = 2.0
COLOURS = {"store": "magenta", "prefill": "cyan", "decode": "green", "router": "blue"}
DESCRIPTION = """\
Starts a store, prefill workers, decode workers and a router as processes of their own, waits
until all of them serve, and restarts a process that dies, however often. Ctrl-C ends the cluster
(status 1 if a process kept dying); a second Ctrl-C ends it at once."""
EPILOG = """\
examples:
  kvrelay up               the shipped model, one worker of each role
  kvrelay up --model DIR --prefill 2 --decode 2 --dtype bfloat16
  kvrelay up --endpoints up.json
  kvrelay generate --endpoints up.json "Hello"   (once it serves)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig(ClusterConfig):
    """The cluster, and what to print about it."""

    http_port: int | None = option(
        HTTP_PORT, "port of the HTTP API, OpenAI's; 0 picks a free one", low=0, high=65535
    )
    http: bool = option(True, "serve no HTTP API")
    endpoints: str | None = option(
        None, "write addresses and process ids to this file, as JSON", metavar="FILE"
    )
    start_timeout: float = option(120.0, "time limit of the start", unit="seconds", low=1)
    quiet: bool = option(False, "do not show the logs of the processes")


def main(argv: Sequence[str]) -> int:
    config = load(UpConfig, argv, "kvrelay up", DESCRIPTION, epilog=EPILOG)
    _check(config)
    run = Up(config if config.http else replace(config, http_port=None))
    with Signals(run.on_signal):
        return run.serve()


def _check(config: UpConfig) -> None:
    """``Rejected`` or ``Unservable`` for what would make a process fail; none is started yet."""
    if not config.http and config.http_port != HTTP_PORT:
        raise Rejected(
            "http_port", f"{config.http_port}: --no-http serves no HTTP API: leave one of them out"
        )
    if config.endpoints:
        endpoints.check_writable(Path(config.endpoints).absolute())
    # Our own engine's check of the model has all reasons in one list.
    check_model_folder(config.model_path, weights=config.engine == "vllm")
    tracing.check(config)
    if config.store is None:
        warning = check_fits("store_budget", config.store_budget, host_memory())
        if warning is not None:
            print_err(f"kvrelay up: {warning}")
    if not config.allow_insecure:
        policy.load(config).check_listen(Address(config.host, config.port), "host")
    if config.store is not None:
        policy.install(config, ADMIN_FIRST)
        _check_store(config.store)


def _check_store(url: str) -> None:
    """Open the store's URL as a worker does; a store that does not answer is told."""
    if not url.startswith(PREFIX):
        with closing(connect(url)) as store:
            try:
                store.stats(STORE_SECONDS)
            except (Unavailable, DeadlineExceeded) as error:
                print_err(f"kvrelay up: store: {error}; until it answers, prompts are computed")
            except KvrelayError:
                pass  # it answers
    elif (inner := read_script(url).store) is not None:
        _check_store(inner)


class Up:
    """One run of the command: the cluster, its signals and its endpoints file."""

    def __init__(self, config: UpConfig) -> None:
        self._config = config
        if config.log_format == "json":
            logs.setup("up", form="json")
        self._named = Path(config.endpoints).absolute() if config.endpoints else None
        self._ended = threading.Event()
        self._status = 0  # exit status of an interrupted start
        self._failing: dict[str, str] = {}  # processes that kept dying until the end
        self._up = False
        self._lock = threading.Lock()  # for lines of many threads
        self.cluster = Cluster(
            with_cluster_token(config), on_line=self._show_line, on_change=self._show_change
        )
        self._model_check = ModelCheck(self.cluster.specs)

    def _may_be_refused(self) -> bool:
        """Whether workers would refuse their model, its length, device or attention somewhere."""
        config = self._config
        return (
            config.model != "recall"
            or config.device not in (None, "auto", "cpu")
            or config.attention_backend not in (None, "auto")
            or config.max_model_len is not None
        )

    def serve(self) -> int:
        if self._may_be_refused():
            self._say(f"Checking {self._config.model_path}")
            self._model_check.run(self._config.start_timeout)
            if self._ended.is_set():
                return self._status
        self._say(f"Starting {self._config.model_path}")
        try:
            self.cluster.start(self._config.start_timeout)
            print_out(describe(self.cluster, self.cluster.view))
            self._up = True
            if (http := self.cluster.http) is not None:
                print_out(f"\nOpenAI API at {paint(f'{http}/v1', 'bold')}; try:")
                print_out("  " + " \\\n      ".join(curl_example(self._config, http)))
            print_out(f"\nServing on {paint(self.cluster.router, 'bold')}; Ctrl-C ends it. Try:")
            example = generate_example(self._config, self.cluster.router)
            print_out("  " + " \\\n      ".join(example))
            self._publish()
            self._ended.wait()
            self._failing = self.cluster.failing()
            for name, how in self._failing.items():
                self._say(how, name)
        except StartInterrupted:
            return self._status
        finally:
            self._say("Stopping")
            self.cluster.stop()
            self._remove_files()
        return 1 if self._failing else 0

    def on_signal(self, number: int) -> None:
        """End in order at the first signal, at once at the second."""
        if self._ended.is_set():
            self._remove_files()
            end_now(self.cluster, number)
        self._status = 128 + number
        self._ended.set()  # first: the end of the model's check is no reason to go on
        self._model_check.stop()
        self.cluster.interrupt()

    def _publish(self) -> None:
        for file in () if self._ended.is_set() else self._files():
            endpoints.write(file, self.cluster.describe())

    def _remove_files(self) -> None:
        for file in self._files():
            endpoints.remove(file)

    def _files(self) -> list[Path]:
        return [file for file in (self._named, endpoints.own_file()) if file is not None]

    def _show_line(self, spec: ProcessSpec, line: str) -> None:
        if self._config.quiet:
            return
        if self._config.log_format != "json":
            self._print(f"{paint(f'{spec.name:>9} |', COLOURS[spec.role], sys.stderr)} {line}")
        elif line.startswith("{"):
            self._print(line)  # it names its service
        else:
            self._say(line, spec.name)

    def _show_change(self, spec: ProcessSpec, what: str) -> None:
        self._say(what, spec.name)
        if self._up:
            self._publish()  # a process id may have changed

    def _say(self, what: str, process: str = "") -> None:
        """A line of this command itself, about one of its processes if it is named."""
        if self._config.log_format == "json":
            with self._lock:
                log.info("%s", f"{process} {what}".strip())
        else:
            named = f"{paint(f'{process:>9}', 'bold', sys.stderr)} " if process else ""
            self._print(named + what)

    def _print(self, line: str) -> None:
        """Print a line, from any thread. A closed terminal stops no thread."""
        with self._lock, suppress(BrokenPipeError):
            print_err(line)


def generate_example(config: ClusterConfig, router: str) -> list[str]:
    """A command that a client on this machine can type, in lines that fit a terminal."""
    lines = [f"{command('generate')} --router {shlex.quote(router)}", *client_flags(config)]
    if config.model == "recall":  # it recalls its system message
        lines += [
            '--chat --temperature 0 --system "The copper mask stands in Boston."',
            '"Where is the copper mask?"',
        ]
    else:
        text = has_tokenizer(Path(config.model_path))
        lines.append('"Once upon a time"' if text else "--token-ids 1,2,3")
    return lines


def curl_example(config: ClusterConfig, http: str) -> list[str]:
    """A request that a client on this machine can type, in lines that fit a terminal.

    ``--tls-name`` is in the certificate in place of the address: curl asks for a URL of this name,
    and connects to the address.
    """
    folder = Path(config.model_path)
    body: dict[str, object] = {"model": config.model_name}
    page = "completions"
    if config.model == "recall":
        page = "chat/completions"
        said = "The copper mask stands in Boston."
        asked = {"role": "user", "content": "Where is the copper mask?"}
        body |= {"temperature": 0, "messages": [{"role": "system", "content": said}, asked]}
    else:
        body["prompt"] = "Once upon a time" if has_tokenizer(folder) else [1, 2, 3]
    address = urlsplit(http).netloc
    named = address
    if config.tls_name is not None and http.startswith("https:"):
        named = str(Address(config.tls_name, Address.parse(address).port))
    url = f"{http.removesuffix(address)}{named}/v1/{page}"
    lines = [["curl", url, "-H", "Content-Type: application/json"]]
    if named != address:
        lines.append(["--connect-to", f"{named}:{address}"])
    if config.tls_ca is not None:
        lines.append(["--cacert", config.tls_ca])
        if config.tls_mutual:
            lines.append(["--cert", str(config.tls_cert), "--key", str(config.tls_key)])
    if config.credentials is not None:
        lines.append(["-H", "Authorization: Bearer YOUR-TOKEN"])
    lines.append(["-d", json.dumps(body)])
    return [shlex.join(line) for line in lines]


def client_flags(config: ClusterConfig) -> list[str]:
    """The flags with which a client reaches a cluster that has TLS or credentials.

    ``--credentials`` of the cluster holds its services' secrets. A client has a file of its own
    with its token, such as ``make-certs`` writes into the same folder.
    """
    lines = []
    if config.tls_ca is not None:
        lines.append(["--tls-ca", config.tls_ca])
        if config.tls_mutual:
            lines.append(["--tls-cert", str(config.tls_cert), "--tls-key", str(config.tls_key)])
    if config.tls_name is not None:
        lines.append(["--tls-name", config.tls_name])
    if config.credentials is not None:
        own = Path(config.credentials).with_name(CLIENT_FILE)
        lines.append(["--credentials", str(own) if own.is_file() else CLIENT_FILE])
    return [shlex.join(line) for line in lines]


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
