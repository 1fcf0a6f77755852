"""The modules in kvrelay/v1 are what the .proto files generate, byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.sources import ROOT

SOURCES = ROOT / "protos"
GENERATED = ROOT / "kvrelay" / "v1"


def test_generated_modules_are_up_to_date(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is of the dev extra")
    protos = sorted(path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.proto"))
    done = _generate(protos, tmp_path)
    assert done.returncode == 0, done.stderr
    made = {path.name: path.read_bytes() for path in (tmp_path / "kvrelay" / "v1").iterdir()}
    stale = [name for name, text in made.items() if _committed(name) != text]
    assert not stale, f"run `make protos` and commit: {stale}"
    left = {path.name for path in GENERATED.glob("*_pb2*.py*")} - set(made)
    assert not left, f"no .proto file generates these any more: {left}"


def test_descriptors_are_named_after_the_package() -> None:
    """A file of a user with a short name, ``types.proto``, cannot collide with ours."""
    names = sorted(path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.proto"))
    assert names
    assert all(name.startswith("kvrelay/v1/") for name in names)


def _generate(protos: list[str], out: Path) -> subprocess.CompletedProcess[str]:
    plugins = str(Path(sys.executable).parent)
    kinds = ("python", "grpc_python")
    typed = ("mypy", "mypy_grpc")
    return subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCES}"),
            *(f"--{kind}_out={out}" for kind in kinds),
            *(f"--{kind}_out=quiet:{out}" for kind in typed),
            *protos,
        ],
        cwd=ROOT,
        env={**os.environ, "PATH": plugins + os.pathsep + os.environ.get("PATH", "")},
        capture_output=True,
        text=True,
        check=False,
    )


def _committed(name: str) -> bytes | None:
    path = GENERATED / name
    return path.read_bytes() if path.exists() else None
