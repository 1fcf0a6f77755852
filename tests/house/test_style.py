"""House rules that a linter does not know: docstrings, sizes, no pickle, no names of machines."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.house.sources import python_files, show, tracked, tree

LONGEST_FILE = 400
LONGEST_FUNCTION = 60
MOST_MODULES = 16  # of a folder, `__init__.py` not counted
TEXT = {".py", ".md", ".toml", ".yml", ".yaml", ".proto", ".cfg", ".txt", ".ini", ""}


def everything() -> tuple[Path, ...]:
    return python_files() + python_files("tests", "benchmarks")


def test_every_source_says_what_it_owns() -> None:
    silent = [
        show(path)
        for path in everything()
        if path.stat().st_size > 0 and ast.get_docstring(tree(path)) is None
    ]
    assert not silent, silent


def test_files_and_functions_are_short() -> None:
    long = []
    for path in python_files():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > LONGEST_FILE:
            long.append(f"{show(path)}: {lines} lines")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > LONGEST_FUNCTION:
                    long.append(f"{show(path)}:{node.lineno} {node.name}: {size} lines")
    assert not long, "\n".join(long)


def test_a_folder_holds_few_modules() -> None:
    folders = Counter(
        path.parent
        for path in python_files() + python_files("benchmarks")
        if path.name != "__init__.py"
    )
    large = [
        f"{show(folder)}: {count}" for folder, count in folders.items() if count > MOST_MODULES
    ]
    assert not large, large


def test_a_class_has_a_name_of_its_own() -> None:
    """No two public classes of one name, wherever they are; generated modules apart."""
    owners: dict[str, list[str]] = {}
    for path in python_files() + python_files("benchmarks"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners.setdefault(node.name, []).append(show(path))
    twice = {name: paths for name, paths in owners.items() if len(paths) > 1}
    assert not twice, twice


def test_one_assignment_a_line() -> None:
    """No tuple assignment to attributes: each attribute has a line of its own."""
    wrong = [
        f"{show(path)}:{node.lineno} {ast.unparse(node)}"
        for path in everything()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Tuple | ast.List)
        and isinstance(node.ctx, ast.Store)
        and any(isinstance(part, ast.Attribute) for part in _parts(node))
    ]
    assert not wrong, "\n".join(wrong)


def _parts(target: ast.Tuple | ast.List) -> list[ast.expr]:
    return [part.value if isinstance(part, ast.Starred) else part for part in target.elts]


def test_no_line_is_kept_from_the_formatter() -> None:
    mark = re.compile(r"#\s*fmt:\s*(skip|off)")
    wrong = [
        f"{show(path)}:{number}"
        for path in everything()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if mark.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_pickled_and_nothing_is_any() -> None:
    wrong = []
    for path in python_files():
        for node in ast.walk(tree(path)):
            names = _names(node)
            if names & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}:
                wrong.append(f"{show(path)}:{getattr(node, 'lineno', 0)} pickles")
            if isinstance(node, ast.Call) and _unpickles(node):
                wrong.append(f"{show(path)}:{node.lineno} loads what may be pickled")
            if isinstance(node, ast.ImportFrom) and node.module == "typing" and "Any" in names:
                wrong.append(f"{show(path)}:{node.lineno} imports Any")
    assert not wrong, "\n".join(wrong)


def _unpickles(node: ast.Call) -> bool:
    """``torch.load``, ``torch.save`` and ``numpy.load(..., allow_pickle=...)``."""
    called = ast.unparse(node.func)
    return called in ("torch.load", "torch.save") or any(
        keyword.arg == "allow_pickle" for keyword in node.keywords
    )


def _names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {alias.name for alias in node.names} | {(node.module or "").split(".")[0]}
    return set()


def test_a_blanket_except_stands_at_an_edge_and_says_why() -> None:
    """``except Exception`` needs a ``noqa: BLE001`` with a reason, so each one was thought of."""
    wrong = []
    for path in python_files():
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler) and _blanket(node):
                line = lines[node.lineno - 1]
                if not re.search(r"noqa: BLE001\W+\w+", line) and not _raises(node):
                    wrong.append(f"{show(path)}:{node.lineno}: {line.strip()}")
    assert not wrong, "\n".join(wrong)


def _blanket(node: ast.ExceptHandler) -> bool:
    if node.type is None:
        return True
    return isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")


def _raises(node: ast.ExceptHandler) -> bool:
    return isinstance(node.body[-1], ast.Raise)


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME", "XX" + "X"])
def test_no_notes_to_self(word: str) -> None:
    pattern = re.compile(rf"\b{word}\b")
    wrong = [
        f"{show(path)}:{number}"
        for path in tracked()
        if path.suffix in TEXT and path.name != "LICENSE"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_folder_of_one_machine_is_named() -> None:
    pattern = re.compile(r"(?<![\w.])/(?:home|root|Users|work)/\w")
    wrong = [
        f"{show(path)}:{number}"
        for path in tracked()
        if path.suffix in TEXT
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not wrong, "\n".join(wrong)
