"""vLLM's environment with what `kvrelay[worker-vllm]` adds to it; vLLM's own packages stay as they
are.

The packages of the extra go into a thin environment that sees those of ``tests.peers``'s vLLM. So
the test of the extra can say which packages pip added, and a change of the extra installs seconds
and not gigabytes. ``python -m tests.vllm.environment`` installs both.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from tests.peers.environment import INSTALL_SECONDS, Environment, NotInstalled, cache
from tests.peers.pins import VLLM

ROOT = Path(__file__).resolve().parents[2]
EXTRA = "worker-vllm"
PIP = ("--quiet", "--disable-pip-version-check", "--prefer-binary", "--no-input")


def requirements() -> tuple[str, ...]:
    """What `pip install kvrelay[worker-vllm]` asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return (*project["dependencies"], *project["optional-dependencies"][EXTRA])


class WorkerEnvironment:
    """The thin environment over vLLM's."""

    def __init__(self) -> None:
        self.vllm = Environment(VLLM)
        wanted = repr((self.vllm.folder.name, requirements()))
        digest = hashlib.sha256(wanted.encode()).hexdigest()[:12]
        self.folder = cache() / f"vllm-worker-{digest}"
        self._ready = self.folder / ".ready"

    @property
    def installed(self) -> bool:
        """Whether both can be used."""
        return self.vllm.installed and self._ready.exists()

    @property
    def reason(self) -> str:
        """Why it is not installed."""
        return self.vllm.reason if not self.vllm.installed else "not installed: run make test-vllm"

    @property
    def python(self) -> str:
        """The interpreter that has vLLM and the extra."""
        return str(self.folder / "bin" / "python")

    @property
    def root(self) -> Path:
        """The checkout: the folder in which its interpreter finds kvrelay."""
        return ROOT

    @property
    def packages(self) -> Path:
        """Where pip put what the extra added."""
        return self._packages(self.folder)

    @staticmethod
    def _packages(folder: Path) -> Path:
        return next((folder / "lib").glob("python3*")) / "site-packages"

    def install(self) -> None:
        """Install what is missing; ``NotInstalled`` says which step failed."""
        self.vllm.install()
        if self._ready.exists():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self._run(sys.executable, "-m", "venv", str(self.folder))
        self._run(self.python, "-m", "pip", "uninstall", "--yes", *PIP[:2], "setuptools")
        below = self._packages(self.vllm.folder)
        (self.packages / "vllm.pth").write_text(f"{below}\n")
        self._run(self.python, "-m", "pip", "install", *PIP, *requirements())
        self._ready.touch()

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": ""},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            check=False,
        )
        if done.returncode:
            last = " ".join(done.stderr.split())[-500:]
            raise NotInstalled(f"{' '.join(command[:4])} ...: {last}")


def main() -> int:
    """Install; what cannot be installed is named, and its tests are skipped."""
    environment, begun = WorkerEnvironment(), time.monotonic()
    try:
        environment.install()
    except NotInstalled as error:
        print(f"vLLM: not installed ({error}); its tests are skipped", flush=True)
    else:
        print(f"vLLM: in {environment.folder}, {time.monotonic() - begun:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
