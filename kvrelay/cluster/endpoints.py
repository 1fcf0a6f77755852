"""The endpoints file of a running cluster: addresses, process ids and roles, as JSON.

Written atomically, so a script that sees the file can read it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
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


def router_of(path: Path) -> str:
    """The router's address in an endpoints file."""
    return _field(path, "router")


def store_of(path: Path) -> str:
    """The URL of the store, or of several, in an endpoints file."""
    return _field(path, "store")


def _field(path: Path, name: str) -> str:
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotFound(
            f"endpoints: cannot read {path}: {error.strerror}; is a cluster up?"
        ) from None
    except ValueError as error:
        raise Rejected("endpoints", f"{path} is not JSON: {error}") from None
    found = content.get(name) if isinstance(content, dict) else None
    if not isinstance(found, str):
        raise Rejected("endpoints", f"{path} names no {name}; write it with kvrelay up --endpoints")
    return found
