"""The environments of the foreign clients: where they lie, how they are installed, why one is not.

They are kept between runs and between checkouts, in ``kvrelay-tests`` of the user's cache folder;
other pins have another folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.peers.pins import Peer

INSTALL_SECONDS = 1200.0
REQUIRED = """
import re, sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
package, *without = sys.argv[1:]
for one in map(Requirement, requires(package) or ()):
    if one.name not in without and (one.marker is None or one.marker.evaluate({"extra": ""})):
        print(f"{one.name}{one.specifier}" if not one.extras else
              f"{one.name}[{','.join(one.extras)}]{one.specifier}")
"""
"""Prints the requirements of an installed package, less some; runs in its environment."""


def cache() -> Path:
    """The folder of all environments."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "kvrelay-tests"


class NotInstalled(Exception):
    """Says which step failed and how."""


class Environment:
    """The environment of one peer; installed or not."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        digest = hashlib.sha256(repr((peer, sys.version_info[:2])).encode()).hexdigest()
        self.folder = cache() / f"{peer.name}-{digest[:12]}"
        self._ready = self.folder / ".ready"

    @property
    def installed(self) -> bool:
        """Whether every step has ended well."""
        return self._ready.exists()

    @property
    def reason(self) -> str:
        """Why it is not installed."""
        path = self._failure
        said = path.read_text() if path.exists() else "not tried: run make test-clients"
        return f"{self.peer.name} is not installed: {said}"

    def program(self, name: str) -> str:
        """The path of one of its commands."""
        return str(self.folder / "bin" / name)

    @property
    def modules(self) -> Path:
        """The folder in which Node finds its packages."""
        return self.folder / "npm"

    def install(self) -> None:
        """All steps; a failure is raised and kept as the reason."""
        if self.installed:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._steps()
        except NotInstalled as error:
            self._failure.write_text(str(error))
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._failure.unlink(missing_ok=True)
        self._ready.touch()

    @property
    def _failure(self) -> Path:
        return self.folder.with_suffix(".failed")

    def _steps(self) -> None:
        peer = self.peer
        self._run(sys.executable, "-m", "venv", str(self.folder))
        self._pip(*peer.packages)
        if peer.bare is not None:
            self._pip("--no-deps", peer.bare)
            package = peer.bare.partition("==")[0]
            python = self.program("python")
            wanted = self._run(python, "-c", REQUIRED, package, *peer.without)
            self._pip(*wanted.split())
        if peer.npm:
            self.modules.mkdir()
            flags = ("--no-fund", "--no-audit", "--ignore-scripts", "--prefix", str(self.modules))
            self._run(self.program("npm"), "install", *flags, *peer.npm)

    def _pip(self, *words: str) -> None:
        flags = ("--quiet", "--disable-pip-version-check", "--prefer-binary")
        self._run(self.program("python"), "-m", "pip", "install", *flags, *words)

    def _run(self, *command: str) -> str:
        path = os.pathsep.join((str(self.folder / "bin"), os.environ["PATH"]))
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "PATH": path},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=INSTALL_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotInstalled(str(error)) from error
        if done.returncode:
            last = " ".join(done.stderr.split())[-500:]
            raise NotInstalled(f"{' '.join(command[:6])} ...: {last}")
        return done.stdout
