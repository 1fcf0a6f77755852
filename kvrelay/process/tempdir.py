"""A temporary directory for libraries that need one at import, such as torch.

A container with a read-only root often has none, but ``/dev/shm``, which is writable.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from kvrelay.errors import Rejected

FALLBACK = Path("/dev/shm")


def ensure_temporary_directory() -> None:
    """Set ``TMPDIR`` to ``/dev/shm`` if this process, and so its children, have no other."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        if not os.access(FALLBACK, os.W_OK | os.X_OK):
            raise Rejected(
                "TMPDIR",
                "no writable temporary directory: mount one (docker run --tmpfs /tmp), or set"
                " TMPDIR to a folder that can be written",
            ) from None
        os.environ["TMPDIR"] = str(FALLBACK)


def require(module: str) -> None:
    """``ensure_temporary_directory`` for ``python -m MODULE``: ends it with one line, status 1."""
    try:
        ensure_temporary_directory()
    except Rejected as error:
        sys.exit(f"{module}: {error}")
