"""The file of a worker's journal: private, with one writer, kept after the worker's death."""

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
    """Writes lines to ``path``, empty at first; a former journal moves to ``path`` + ``BEFORE``.

    A write that fails raises: the journal ends there, and the log says why.
    """
    try:
        file = os.fdopen(_open_empty(path), "w", buffering=1, encoding="utf-8")
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


def _open_empty(path: str) -> int:
    """The descriptor of the empty file. Its lock ends with the process, however that ends."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return descriptor
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not status.st_size:
            os.fchmod(descriptor, 0o600)  # the journal holds prompts
            return descriptor
        os.replace(path, path + BEFORE)
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return _open_empty(path)
