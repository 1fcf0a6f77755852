"""What is imported is declared in pyproject.toml, so that a clean clone has it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

from kvrelay.version import VERSION
from tests.house.sources import PACKAGES, ROOT, python_files, show
from tests.house.test_imports import imported

OWN = {*PACKAGES, "tests", "benchmarks", "_typeshed"}
OPTIONAL = {"cryptography", "flash-attn", "triton"}  # imported where they are found, never needed
# The runtime of these comes with another one's module of the same name.
SHARED = {"google": {"protobuf", "googleapis-common-protos"}}


@cache
def declared(*extras: str) -> frozenset[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [
        line for extra in extras for line in project["optional-dependencies"][extra]
    ]
    return frozenset(normal(re.split(r"[<>=;\[ ]", line)[0]) for line in lines)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def undeclared(folders: tuple[str, ...], known: frozenset[str]) -> list[str]:
    owners = packages_distributions()
    wrong = []
    for path in python_files(*folders):
        for module, line in imported(path):
            top = module.split(".")[0]
            if top in sys.stdlib_module_names or top in OWN or top == "__future__":
                continue
            names = SHARED.get(top) or set(map(normal, owners.get(top, [top])))
            if not names & (known | OPTIONAL):
                wrong.append(f"{show(path)}:{line} imports {module}")
    return wrong


def test_what_the_packages_import_is_declared() -> None:
    assert not undeclared(PACKAGES, declared())


def test_there_is_one_version() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION


def test_every_package_is_installed() -> None:
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    assert tuple(hatch["build"]["targets"]["wheel"]["packages"]) == PACKAGES


def test_a_script_beside_the_clone_finds_the_package(tmp_path: Path) -> None:
    """There ``kvrelay`` is a folder too: the clone."""
    (tmp_path / "kvrelay").mkdir()
    script = tmp_path / "mine.py"
    script.write_text("from kvrelay import Client")
    subprocess.run([sys.executable, script], check=True, timeout=60, cwd=tmp_path)


def test_what_the_tests_import_is_declared() -> None:
    assert not undeclared(("tests",), declared("dev"))
