"""The endpoints file of a running cluster: addresses, process ids, roles and its secrets, as JSON.

Written atomically, so a script that sees the file can read it. Only its owner can: who has the
token may do everything with the cluster, and who has the fleet key can sign blocks. ``kvrelay up``
also writes one to a private folder of the user, where the user's other commands find the secrets by
the address they call.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from kvrelay.errors import KvrelayError, NotFound, Rejected
from kvrelay.rpc.security.options import SecurityOptions

S = TypeVar("S", bound=SecurityOptions)


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
    """Remove the file of a cluster that ended, and the private folder once it is empty."""
    with suppress(OSError):
        path.unlink()
    if path.parent == _private_folder():
        with suppress(OSError):
            path.parent.rmdir()


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


def own_file() -> Path | None:
    """The endpoints file of this process in the user's private folder; ``None`` without one.

    Makes the folder if it is absent.
    """
    folder = _private_folder(make=True)
    return None if folder is None else folder / f"up-{os.getpid()}.json"


def authorized(options: S, file: str | None, *addresses: str) -> S:
    """The options with the secrets of the cluster at these addresses, unless they have credentials.

    They are in the endpoints file ``file``, or in one of this user's own.
    """
    if options.credentials or options.token or options.cluster_token:
        return options
    content = _content(Path(file)) if file is not None else _content_at(addresses)
    token, key = content.get("token"), content.get("fleet_key")
    if not isinstance(token, str):
        return options
    fleet_key = options.fleet_key or (key if isinstance(key, str) else None)
    return replace(options, cluster_token=token, fleet_key=fleet_key)


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


def _content_at(addresses: Collection[str]) -> dict[str, object]:
    """The newest of this user's own files with one of the addresses; empty without one."""
    folder = _private_folder()
    files = [] if folder is None else folder.glob("up-*.json")
    for path in sorted(files, key=_age):
        with suppress(KvrelayError):  # its cluster has just ended
            content = _content(path)
            processes = content.get("processes")
            for process in processes if isinstance(processes, list) else ():
                if isinstance(process, dict) and process.get("address") in addresses:
                    return content
    return {}


def _age(path: Path) -> float:
    """A killed cluster leaves its file, so the newest one with an address counts."""
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0


def _private_folder(make: bool = False) -> Path | None:
    """The folder that only this user can use; ``None`` if there is none."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime, "kvrelay") if runtime else _temporary_folder()
    if folder is None:
        return None
    try:
        if make:
            folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    return folder if private and status.st_uid == os.getuid() else None


def _temporary_folder() -> Path | None:
    with suppress(OSError):  # no folder is writable
        return Path(tempfile.gettempdir(), f"kvrelay-{os.getuid()}")
    return None


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
