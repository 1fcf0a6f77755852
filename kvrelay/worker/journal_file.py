"""The file of a worker's journal: private, written by one worker, kept when that one has died."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Callable

from kvrelay.errors import Rejected

BEFORE = ".before"

log = logging.getLogger(__name__)


def writer(path: str) -> Callable[[str], object]:
    """Writes lines to ``path``, empty at first; what was there is now ``path`` + ``BEFORE``.

    One that cannot be written raises; its reader sees where the journal breaks off, the log why.
    """
    try:
        file = os.fdopen(_opened(path), "w", buffering=1, encoding="utf-8")
    except BlockingIOError as error:
        raise Rejected(
            "journal", f"another worker writes {path}: give each worker a file of its own"
        ) from error
    except OSError as error:
        raise Rejected("journal", f"cannot write {path}: {error.strerror}") from error

    def write(line: str) -> None:
        try:
            file.write(line)
        except OSError as error:
            log.error("the journal %s ends here: %s", path, error.strerror)
            raise

    return write


def _opened(path: str) -> int:
    """Its descriptor. A lock tells who writes it and is gone with the process, however it ends."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        return descriptor
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not found.st_size:
            os.fchmod(descriptor, 0o600)  # it holds prompts, whoever made the file
            return descriptor
        os.replace(path, path + BEFORE)
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return _opened(path)
