"""Imports go down only: a folder sees the layers below its own, and never a sibling.

docs/architecture.md has the map.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.sources import PACKAGES, ROOT, python_files, show, tree

# The deepest folder that is listed here decides; a folder sees the floors below its own.
FLOORS = {
    "kvrelay": 1,  # errors, fleet, installation, model_folder, sampling, tools, usage, version
    "kvrelay/v1": 0,
    "kvrelay/config": 2,
    "kvrelay/process": 2,
    "kvrelay/block": 2,
    "kvrelay/text": 2,
    "kvrelay/rpc": 3,
    "kvrelay/rpc/server": 4,
    "kvrelay/client": 4,
    "kvrelay/engine/core": 2,
    "kvrelay/engine/cuda": 2,
    "kvrelay/engine/attention": 3,
    "kvrelay/engine/sampling": 3,
    "kvrelay/engine/model": 4,
    "kvrelay/engine": 5,
    "kvstore": 5,
    "kvrelay/connector": 6,
    "kvrelay/engine/vllm": 7,
    "kvrelay/worker": 8,
    "prefill_service": 9,
    "decode_service": 9,
    "router/config": 8,  # a file: the rooms below import it
    "router/workers": 9,
    "router/placement": 10,
    "router/queue": 10,
    "router/generate": 11,
    "router/http": 12,
    "router": 13,
    "kvrelay/load": 14,
    "kvrelay/recall": 14,
    "kvrelay/cluster": 14,
    "kvrelay/conform": 15,
    "kvrelay/cli": 16,
}
ROUTER = (
    "router",
    "router/workers",
    "router/placement",
    "router/queue",
    "router/generate",
    "router/http",
)
ROUTER_BARRED = {
    "kvrelay/client",
    "kvrelay/engine",
    "kvstore",
    "kvrelay/connector",
    "kvrelay/worker",
    "prefill_service",
    "decode_service",
}
# What a folder may not see although its floor would allow it.
BARRED = {
    **dict.fromkeys(ROUTER, ROUTER_BARRED),
    "kvstore": {"kvrelay/client", "kvrelay/engine"},
    "kvrelay/block": {"kvrelay/v1"},
    "kvrelay/text": {"kvrelay/v1"},
}
WITHOUT_TORCH = (
    "block",
    "client",
    "config",
    "connector",
    "engine/core",
    "process",
    "rpc",
    "text",
)
LAZY = {"kvrelay/__init__.py", "kvrelay/__main__.py"}  # they name what is above them, on first use
FACES = {"prefill_service", "decode_service"}  # put together where a process begins
CORE = ("blocks", "plan", "request", "scheduler", "totals", "usage")
CORE_LINES = 700
PURE_ROUTER = {
    "generate/retry.py",
    "generate/usage.py",
    "placement/affinity.py",
    "placement/costs.py",
    "placement/policy.py",
    "queue/admission.py",
    "queue/fair.py",
    "queue/quotas.py",
    "queue/service_times.py",
    "workers/candidate.py",
    "workers/fleet.py",
    "workers/health.py",
}
IMPURE = {"asyncio", "grpc", "logging", "random", "socket", "threading", "time"}
# What each room of the store may see of its siblings: no code of the client is the server's.
STORE_ROOMS: dict[str, set[str]] = {
    "index": set(),
    "wire": set(),
    "multi": set(),
    "redis": {"wire"},
    "client": {"index", "multi", "redis", "wire"},
    "disk": {"index", "server"},
    "server": {"disk", "index", "wire"},
    "trace": {"index"},
}
ROW = re.compile(r"^\| (\d+)(?: to (\d+))? \| (`.*?`) \|", re.MULTILINE)  # of the map
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
    """Modules that a file imports, wherever the import stands."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node.lineno


def test_every_package_has_a_floor() -> None:
    assert {folder.split("/")[0] for folder in FLOORS} == set(PACKAGES)


def test_the_map_has_these_floors() -> None:
    """Those of docs/architecture.md; a folder that it leaves out is one of its parent's layers."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    mapped: dict[str, range] = {}
    for low, high, cell in ROW.findall(page.partition("## The map\n")[2]):
        for name in re.findall(r"`([\w/]+?)(?:/|/\*\.py)`", cell):
            mapped[name] = range(int(low), int(high or low) + 1)
    wrong = []
    for folder, floor in FLOORS.items():
        within = [name for name in mapped if f"{folder}/".startswith(f"{name}/")]
        found = mapped[max(within, key=len)]
        exact = folder not in mapped or floor == found[-1]
        if folder != "router/config" and not (exact and floor in found):
            wrong.append(f"{folder}: {floor}, the map has {found}")
    assert not wrong, "\n".join(wrong)


def test_every_folder_of_the_library_has_a_floor() -> None:
    """Its rooms, those of the engine, and the servers' side of rpc."""
    folders = {
        show(path)
        for house in ("kvrelay", "kvrelay/engine")
        for path in (ROOT / house).iterdir()
        if _is_package(path)
    }
    listed = {folder for folder in FLOORS if folder.startswith("kvrelay/")}
    assert folders | {"kvrelay/rpc/server"} == listed


def _is_package(path: Path) -> bool:
    return (path / "__init__.py").exists()


def folder_of(name: str) -> str | None:
    """The deepest folder with a floor that ``name``, a path or module with ``/``, is in."""
    return max(
        (folder for folder in FLOORS if f"{name}/".startswith(f"{folder}/")), key=len, default=None
    )


@pytest.mark.parametrize("folder", sorted(FLOORS))
def test_imports_go_down(folder: str) -> None:
    wrong = []
    for path in python_files(folder.split("/")[0]):
        if folder_of(show(path)) != folder or show(path) in LAZY:
            continue
        for module, line in imported(path):
            other = folder_of(module.replace(".", "/"))
            if other is None or other == folder:
                continue
            if path.name == "__main__.py" and other in FACES:
                continue
            if FLOORS[other] >= FLOORS[folder] or _barred(folder, other):
                wrong.append(f"{show(path)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", sorted(STORE_ROOMS))
def test_rooms_of_the_store_see_what_they_may(room: str) -> None:
    siblings = {path.name for path in (ROOT / "kvstore").iterdir() if _is_package(path)}
    assert siblings == set(STORE_ROOMS)
    process = {"config", "main"}  # what makes a service of the parts
    wrong = []
    for path in python_files(f"kvstore/{room}"):
        for module, line in imported(path):
            parts = module.split(".")
            seen = parts[1] if parts[0] == "kvstore" and len(parts) > 1 else ""
            barred = (set(STORE_ROOMS) - STORE_ROOMS[room] - {room}) | process
            if seen in barred:
                wrong.append(f"{show(path)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def _barred(folder: str, other: str) -> bool:
    return any(f"{other}/".startswith(f"{barred}/") for barred in BARRED.get(folder, ()))


def test_products_do_not_import_tests() -> None:
    wrong = [
        f"{show(path)}:{line}"
        for path in python_files()
        for module, line in imported(path)
        if module.split(".")[0] in ("tests", "benchmarks")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_pure_engine_sees_the_standard_library_and_plain_values_only() -> None:
    allowed = {"kvrelay.engine.core", "kvrelay.errors", "kvrelay.sampling", "kvrelay.usage"}
    wrong = []
    for path in python_files("kvrelay/engine/core"):
        for module, line in imported(path):
            plain = module.split(".")[0] in sys.stdlib_module_names
            if not plain and not any(f"{module}.".startswith(f"{name}.") for name in allowed):
                wrong.append(f"{show(path)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_pure_router_reads_no_clock_and_waits_for_nothing() -> None:
    wrong = [
        f"{show(path)}:{line} imports {module}"
        for path in python_files("router")
        if show(path).removeprefix("router/") in PURE_ROUTER
        for module, line in imported(path)
        if module.split(".")[0] in IMPURE
    ]
    assert not wrong, "\n".join(wrong)
    assert all((ROOT / "router" / name).is_file() for name in PURE_ROUTER)


def test_the_core_of_the_accounting_stays_small() -> None:
    """The scheduler, the pool and the records together; docstrings and comments are free."""
    lines = {show(path): len(_code_lines(path)) for path in _core()}
    assert sum(lines.values()) < CORE_LINES, lines


@pytest.mark.parametrize(
    "package",
    ["kvstore", "router", *(f"kvrelay/{room}" for room in WITHOUT_TORCH)],
)
def test_torch_stays_out_of(package: str) -> None:
    wrong = [
        f"{show(path)}:{line}"
        for path in python_files(package)
        for module, line in imported(path)
        if module.split(".")[0] == "torch"
    ]
    assert not wrong, "\n".join(wrong)


def _core() -> list[Path]:
    return [ROOT / "kvrelay/engine/core" / f"{name}.py" for name in CORE]


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
