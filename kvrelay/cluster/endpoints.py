"""The endpoints file of a running cluster: addresses, process ids and roles, as JSON.

Written atomically, so a script that sees the file can read it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvrelay.errors import NotFound, Rejected


def check_writable(path: Path) -> None:
    """Raise ``Rejected`` if ``write`` would fail, as far as a check before it can show."""
    why = None
    if path.is_dir():
        why = "it is a folder"
    elif not path.parent.is_dir():
        why = f"there is no folder {path.parent}"
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        why = f"no permission to write in {path.parent}"
    if why is not None:
        raise Rejected("endpoints", f"cannot write {path}: {why}")


def write(path: Path, content: Mapping[str, object]) -> None:
    """Write the JSON atomically."""
    text = json.dumps(content, indent=2) + "\n"
    try:
        handle, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    except OSError as error:
        raise Rejected("endpoints", f"cannot write {path}: {error.strerror}") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(name)
        raise Rejected("endpoints", f"cannot write {path}: {error.strerror}") from None


def remove(path: Path) -> None:
    """Remove the file of a cluster that ended."""
    with suppress(OSError):
        path.unlink()


@dataclass(frozen=True, slots=True)
class ListedProcess:
    """One process of the file. ``failing``: how it ended, if it keeps dying."""

    name: str
    address: str
    pid: int | None
    failing: str | None


def router_of(path: Path) -> str:
    """The router's address in an endpoints file."""
    return _field(path, "router")


def store_of(path: Path) -> str:
    """The URL of the store, or of several, in an endpoints file."""
    return _field(path, "store")


def processes_of(path: Path) -> tuple[ListedProcess, ...]:
    """The processes of a running cluster; ``NotFound`` if ``kvrelay up`` itself has ended."""
    match _content(path):
        case {"pid": int(supervisor), "processes": list(entries)}:
            listed = tuple(_process(path, entry) for entry in entries)
        case _:
            raise _incomplete(path, "processes")
    if not _runs(supervisor):
        raise NotFound(f"endpoints: the kvrelay up that wrote {path} has ended: start it again")
    return listed


def _process(path: Path, entry: object) -> ListedProcess:
    match entry:
        case {
            "name": str(name),
            "address": str(address),
            "pid": int() | None as pid,
            "failing": str() | None as failing,
        }:
            return ListedProcess(name, address, pid, failing)
    raise _incomplete(path, "processes")


def _field(path: Path, name: str) -> str:
    found = _content(path).get(name)
    if not isinstance(found, str):
        raise _incomplete(path, name)
    return found


def _content(path: Path) -> dict[str, object]:
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotFound(
            f"endpoints: cannot read {path}: {error.strerror}; is a cluster up?"
        ) from None
    except ValueError as error:
        raise Rejected("endpoints", f"{path} is not JSON: {error}") from None
    return content if isinstance(content, dict) else {}


def _incomplete(path: Path, name: str) -> Rejected:
    return Rejected("endpoints", f"{path} names no {name}; write it with kvrelay up --endpoints")


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
