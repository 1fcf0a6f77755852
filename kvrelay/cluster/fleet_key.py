"""The fleet key that a user keeps, for blocks that outlive the cluster which wrote them.

It is in ``$XDG_STATE_HOME/kvrelay/fleet-key`` (default ``~/.local/state``), mode 0600.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("kvrelay.cluster")

MAX_BYTES = 1024


def kept_key() -> str | None:
    """This user's key, drawn at the first call; ``None``, with a warning, if it cannot be kept."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = Path(home, "kvrelay", "fleet-key")
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _draw(path)
        return _read(path)
    except OSError as error:
        log.warning(
            "%s: %s: blocks that this cluster stores are of no use to a later one;"
            " give both the same KVRELAY_FLEET_KEY",
            path,
            error.strerror or error,
        )
        return None


def _draw(path: Path) -> None:
    """Write a new key whole, unless another process has just done so."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _read(path: Path) -> str:
    with path.open(encoding="ascii") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(0, "must belong to this user and be readable by no other")
        return file.read(MAX_BYTES).strip()
