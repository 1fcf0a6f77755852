"""Where the sources are: every tracked Python file but the generated ones."""

from __future__ import annotations

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("decode_service", "kvrelay", "kvstore", "prefill_service", "router")


def generated(path: Path) -> bool:
    return path.parent.name == "v1" and "_pb2" in path.name


@cache
def python_files(*folders: str) -> tuple[Path, ...]:
    """The Python files under the folders (all packages by default), generated ones left out."""
    found = [path for name in folders or PACKAGES for path in (ROOT / name).rglob("*.py")]
    return tuple(sorted(path for path in found if not generated(path)))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def tracked() -> tuple[Path, ...]:
    """Every file git knows, or every file of the packages where there is no git."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        return python_files()
    names = done.stdout.decode().split("\0")
    return tuple(ROOT / name for name in names if name and (ROOT / name).is_file())


def show(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
