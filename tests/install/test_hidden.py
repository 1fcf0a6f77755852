"""Packages of a user that hide ours, and a user's project that holds the wheel."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.install.conftest import Installed

WORDS = [("up",), ("demo",), ("store", "stats", "--store", "kvrelay://127.0.0.1:1")]
SERVICES = {"router": "kvstore", "decode_service": "kvstore", "kvstore": "router"}
SHOW = "from kvrelay import installation as it; print(it.clone_root(), it.install_line('store'))"


def hiding(folder: Path, name: str, *, file: bool) -> None:
    """Put a package or a module ``name`` of the user into a folder."""
    path = folder / f"{name}.py" if file else folder / name / "__init__.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text("raise RuntimeError('code of the user was imported')\n")


def with_path(
    made: Installed, folder: Path, *words: str | Path
) -> subprocess.CompletedProcess[str]:
    return made.run("env", f"PYTHONPATH={folder}", *words, cwd=folder.parent)


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
@pytest.mark.parametrize("name", ["kvstore", "router"])
def test_a_command_names_the_folder(
    with_all: Installed, tmp_path: Path, words: tuple[str, ...], name: str
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    hiding(folder, name, file=name == "router")
    done = with_path(with_all, folder, with_all.kvrelay, *words)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert f"{folder} has a {name!r}" in done.stderr
    assert "PYTHONPATH" in done.stderr


@pytest.mark.parametrize("module", SERVICES)
def test_a_service_names_the_folder(with_all: Installed, tmp_path: Path, module: str) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    hiding(folder, SERVICES[module], file=False)
    done = with_path(with_all, folder, with_all.python, "-P", "-m", module)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert f"{module}: {folder} has a {SERVICES[module]!r}" in done.stderr


def test_doctor_names_the_folder(with_all: Installed, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    hiding(folder, "router", file=False)
    done = with_path(with_all, folder, with_all.kvrelay, "doctor", "--json")
    assert done.returncode == 1, done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert any(str(folder) in one["means"] for one in findings if one["state"] == "missing")


def test_a_client_needs_none_of_them(with_all: Installed, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    hiding(folder, "kvstore", file=False)
    done = with_path(with_all, folder, with_all.kvrelay, "generate", "--help")
    assert done.returncode == 0, done.stderr


def test_a_project_with_the_wheel_in_it_is_no_clone(
    wheel: Path, with_all: Installed, tmp_path: Path
) -> None:
    """As ``pip install --target .`` leaves it in a project that has a Makefile."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    (tmp_path / "Makefile").write_text("all:\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "theirs"\n')
    (tmp_path / "protos").mkdir()
    done = with_all.run(with_all.python, "-c", SHOW, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("None ")
    assert done.stdout.rstrip().endswith("'kvrelay[store]'")
