"""kvrelay as its users get it: the built wheel, installed beside its dependencies.

Nothing is fetched: the virtual environments see the packages that the tests run with.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.house.sources import ROOT
from tests.house.test_dependencies import declared

# Modules of a user that have names of parts of ours, now or in the past.
FOREIGN = (
    "common/__init__.py",
    "rpc.py",
    "protos/__init__.py",
    "text.py",
    "router/__init__.py",
    "router/__main__.py",
    "worker.py",
    "engine/__init__.py",
)


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel."""

    root: Path

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def kvrelay(self) -> Path:
        return self.root / "bin" / "kvrelay"

    def run(
        self, *words: str | Path, cwd: Path, seconds: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """A program of this environment; other tests set variables that are options to it.

        Not on its path: the programs of the environment in which the tests run, and uv.
        """
        own = {name: text for name, text in os.environ.items() if not name.startswith("KVRELAY_")}
        own["PATH"] = os.defpath
        return subprocess.run(
            [str(word) for word in words],
            cwd=cwd,
            env=own,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120, stdout=subprocess.DEVNULL)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def with_all(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel, and every package that the tests run with."""
    seen = [Path(path) for path in sys.path if path.endswith("site-packages")]
    return _install(wheel, tmp_path_factory.mktemp("all"), seen)


@pytest.fixture(scope="session")
def client_only(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel as ``pip install kvrelay`` leaves it: with the packages of the base install."""
    return _install(wheel, tmp_path_factory.mktemp("client"), [_seen(tmp_path_factory)])


@pytest.fixture(scope="session")
def load_only(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """As ``pip install kvrelay[load]`` leaves it."""
    return _install(wheel, tmp_path_factory.mktemp("load"), [_seen(tmp_path_factory, "load")])


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder of a user whose modules must not be imported by anything of ours."""
    for name in FOREIGN:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"raise RuntimeError({name!r} + ' of the user was imported')\n")
    return tmp_path


def _seen(factory: pytest.TempPathFactory, *extras: str) -> Path:
    """A folder with the packages of the base install and of these extras."""
    seen = factory.mktemp("seen")
    for name in _closure(declared(*extras)):
        for path in _places(name):
            link = seen / path.name
            if not link.exists():
                link.symlink_to(path)
    return seen


def _install(wheel: Path, root: Path, seen: list[Path]) -> Installed:
    made = Installed(root)
    venv.create(root, with_pip=False, symlinks=True)
    command = [sys.executable, "-m", "pip", "--python", str(made.python), "install"]
    flags = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*command, *flags, str(wheel)], check=True, timeout=120)
    (packages,) = root.glob("lib/python*/site-packages")
    (packages / "seen.pth").write_text("".join(f"{path}\n" for path in seen))
    return made


def _closure(names: frozenset[str]) -> set[str]:
    """These distributions and what they need, extras left out."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name in found:
            continue
        try:
            lines = distribution(name).requires or ()
        except PackageNotFoundError:  # for other versions of Python
            continue
        found.add(name)
        needed = (line for line in lines if "extra ==" not in line)
        left.extend(re.split(r"[<>=~!;\[ (]", line)[0] for line in needed)
    return found


def _places(name: str) -> Iterator[Path]:
    """The folders and files that a distribution has in ``site-packages``."""
    made = distribution(name)
    tops = {file.parts[0] for file in made.files or ()} - {"..", "__pycache__"}
    yield from (Path(str(made.locate_file(top))) for top in tops)
