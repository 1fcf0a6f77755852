"""The wheel: what it puts into ``site-packages``, and what a program that imports it gets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvrelay.engine.attention.native import build as native
from tests.house.sources import PACKAGES, ROOT, tracked
from tests.install.conftest import Installed

CLIENT = "from kvrelay import AsyncClient, Client, Rejected, Usage"
HEAVY = ("torch", "transformers", "tokenizers", "numpy", "redis", "kvstore", "router", "xxhash")
THEIRS = """
syntax = "proto3";
package theirs;
message Sampling { string name = 1; }
"""


def test_the_top_level_is_the_five_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert "kvrelay/v1/types_pb2.pyi" in names
    assert any(name.startswith("kvrelay/recall/model/") for name in names)


def test_it_has_the_attention_kernel(wheel: Path, with_all: Installed, tmp_path: Path) -> None:
    """Compiled for this platform; it loads and passes its test where no clone is."""
    try:
        native.compiler()
    except native.BuildError as error:
        pytest.skip(str(error))
    assert not wheel.name.endswith("-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    folder = "kvrelay/engine/attention/native"
    objects = [name.removeprefix(f"{folder}/") for name in names if name.endswith(".so")]
    assert [name.split("-")[0] for name in objects] == sorted(native.variants())
    program = "from kvrelay.engine.attention.native.library import load_kernel; load_kernel()"
    done = with_all.run(with_all.python, "-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_wheel_is_built_without_a_compiler(tmp_path: Path) -> None:
    """With what git has of the clone; the reason is shown, and the wheel runs anywhere."""
    clone = tmp_path / "clone"
    for path in tracked():
        copy = clone / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=clone,
        env={**os.environ, "CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "not compiled: no C++ compiler was found" in done.stdout + done.stderr
    (built,) = tmp_path.glob("*.whl")
    assert built.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(built).namelist() if name.endswith(".so")]


IMPORT_ALL = """
from importlib import import_module
for name in {modules!r}:
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        room = "kvrelay.engine." + {{"triton": "cuda.", "vllm": "vllm."}}[error.name.split(".")[0]]
        assert name.startswith(room), (name, error)
"""


def test_its_metadata_has_the_extras(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = archive.read(name).decode().splitlines()
    extras = {line.split(": ")[1] for line in lines if line.startswith("Provides-Extra: ")}
    assert extras == {
        *("router", "store", "worker", "worker-vllm", "certs", "load", "otel", "all", "cuda"),
        *("triton", "dev"),
    }
    base = [line for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    assert len(base) == 3, base


def test_every_module_of_it_imports(wheel: Path, with_all: Installed, tmp_path: Path) -> None:
    """Where no clone is: nothing that lies beside the packages in a clone is needed.

    Kernels for GPUs need triton, and what runs inside vLLM needs vLLM: no service imports either
    without being told.
    """
    names = zipfile.ZipFile(wheel).namelist()
    paths = [name.removesuffix(".py") for name in names if name.endswith(".py")]
    modules = sorted(path.replace("/", ".").removesuffix(".__init__") for path in paths)
    program = IMPORT_ALL.format(modules=modules)
    done = with_all.run(with_all.python, "-c", program, cwd=tmp_path, seconds=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [("bench",), ("store", "bench"), ("make-model",)])
def test_a_command_of_a_clone_says_so(
    with_all: Installed, tmp_path: Path, words: tuple[str, ...]
) -> None:
    done = with_all.run(with_all.kvrelay, *words, "--help", cwd=tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "clone" in done.stderr


def test_the_client_imports_nothing_heavy(with_all: Installed, tmp_path: Path) -> None:
    """Where all of it could be imported."""
    program = (
        f"import json, sys; {CLIENT}; Client('127.0.0.1:1').close();"
        f"print(json.dumps(sorted(set({HEAVY!r}) & sys.modules.keys())))"
    )
    done = with_all.run(with_all.python, "-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_the_client_works_beside_foreign_modules(client_only: Installed, foreign: Path) -> None:
    """In a script, and with ``-c`` in that folder: both put it first on the path."""
    script = foreign / "mine.py"
    script.write_text(f"{CLIENT}\nwith Client('127.0.0.1:1') as client:\n    print(client)\n")
    for words in ((script,), ("-c", script.read_text())):
        done = client_only.run(client_only.python, *words, cwd=foreign)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [("--version",), ("generate", "--help"), ("chat", "--help")])
@pytest.mark.parametrize("how", ["command", "module"])
def test_the_command_works_beside_foreign_modules(
    client_only: Installed, foreign: Path, how: str, words: tuple[str, ...]
) -> None:
    start = [client_only.kvrelay] if how == "command" else [client_only.python, "-m", "kvrelay"]
    done = client_only.run(*start, *words, cwd=foreign)
    assert done.returncode == 0, done.stderr
    assert "kvrelay" in done.stdout


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_a_foreign_types_proto_lives_beside_ours(
    client_only: Installed, tmp_path: Path, first: str
) -> None:
    folder = tmp_path / "protos"
    folder.mkdir()
    (folder / "types.proto").write_text(THEIRS)
    flags = [f"-I{tmp_path}", f"--python_out={tmp_path}", "protos/types.proto"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *flags], check=True, timeout=60)
    theirs = "from protos.types_pb2 import Sampling"
    ours = f"{CLIENT}\nfrom kvrelay.v1 import types_pb2"
    lines = [ours, theirs] if first == "ours" else [theirs, ours]
    lines += [
        "assert Sampling.FromString(Sampling(name='x').SerializeToString()).name == 'x'",
        "assert types_pb2.Sampling(top_k=3).top_k == 3",
        "Client('127.0.0.1:1').close()",
    ]
    done = client_only.run(client_only.python, "-c", "\n".join(lines), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
