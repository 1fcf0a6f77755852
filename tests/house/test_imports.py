"""Imports go down only: a package sees the floors below its own, and never a sibling.

CONTRIBUTING.md says what belongs on which floor.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.sources import PACKAGES, ROOT, python_files, show, tree

FLOORS = {
    "protos": 0,
    "common": 1,
    "kvblock": 2,
    "rpc": 2,
    "text": 2,
    "engine": 3,
    "kvstore": 3,
    "connector": 4,
    "worker": 5,
    "router": 6,
    "prefill_service": 6,
    "decode_service": 6,
    "kvrelay": 7,
}
# What a package may not see although its floor would allow it.
BARRED = {
    "router": {"engine", "kvstore", "connector", "worker"},
    "kvstore": {"engine"},
    "kvblock": {"protos"},
    "text": {"protos", "rpc", "kvblock"},
}
FACES = {"prefill_service", "decode_service"}  # put together where a process begins
CORE = ("blocks", "plan", "request", "scheduler", "totals", "usage")
PURE = (*CORE, "external", "sources", "updates", "work")
CORE_LINES = 600
NOT_CODE = {
    tokenize.ENCODING,
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Top-level names that a file imports, wherever the import stands."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node.lineno


def test_every_package_has_a_floor() -> None:
    assert set(FLOORS) == set(PACKAGES)


@pytest.mark.parametrize("package", sorted(FLOORS))
def test_imports_go_down(package: str) -> None:
    wrong = []
    for path in python_files(package):
        for module, line in imported(path):
            top = module.split(".")[0]
            if top not in FLOORS or top == package:
                continue
            if path.name == "__main__.py" and top in FACES:
                continue
            if FLOORS[top] >= FLOORS[package] or top in BARRED.get(package, ()):
                wrong.append(f"{show(path)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_products_do_not_import_tests() -> None:
    wrong = [
        f"{show(path)}:{line}"
        for path in python_files()
        for module, line in imported(path)
        if module.split(".")[0] in ("tests", "benchmarks")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_pure_engine_sees_the_standard_library_and_common_only() -> None:
    allowed = set(sys.stdlib_module_names) | {"common", "engine"}
    pure = {f"engine.{name}" for name in PURE}
    wrong = []
    for path in _engine(PURE):
        for module, line in imported(path):
            top = module.split(".")[0]
            if top not in allowed or (top == "engine" and module not in pure):
                wrong.append(f"{show(path)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_core_of_the_accounting_stays_small() -> None:
    """The scheduler, the pool and the records together; docstrings and comments are free."""
    lines = {show(path): len(_code_lines(path)) for path in _engine(CORE)}
    assert sum(lines.values()) < CORE_LINES, lines


@pytest.mark.parametrize("package", ["kvstore", "router", "kvblock", "rpc", "text", "common"])
def test_torch_stays_out_of(package: str) -> None:
    wrong = [
        f"{show(path)}:{line}"
        for path in python_files(package)
        for module, line in imported(path)
        if module.split(".")[0] == "torch"
    ]
    assert not wrong, "\n".join(wrong)


def _engine(names: tuple[str, ...]) -> list[Path]:
    return [ROOT / "engine" / f"{name}.py" for name in names]


def _code_lines(path: Path) -> set[int]:
    """Lines that hold a token of code."""
    docs: set[int] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    with path.open("rb") as file:
        lines = {
            line
            for token in tokenize.tokenize(file.readline)
            if token.type not in NOT_CODE
            for line in range(token.start[0], token.end[0] + 1)
        }
    return lines - docs
