"""The directory of the disk tier: its lock, its format, and the names of its files.

One store at a time uses it: the lock ends with the process. Blocks of an older header format are
removed, because no reader asks for their names. A directory of another disk format or a newer
header format, or with other files, is refused and left as it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import time
from pathlib import Path

from kvrelay.block.header import VERSION as HEADER_VERSION
from kvrelay.errors import Rejected

log = logging.getLogger("kvrelay.store")

_KIND = "kvrelay store, disk format 1, header format "
FORMAT = f"{_KIND}{HEADER_VERSION}\n"
FIELD = "disk"
_FORMAT, _LOCK = "FORMAT", "lock"
_OURS = re.compile(r"segment-([0-9a-f]{16})")
_READABLE = {f"{_KIND}{version}\n" for version in range(1, HEADER_VERSION + 1)}
_NEW = f"{_FORMAT}.new"  # left by a start that ended early
_ALLOWED = {"lost+found", _LOCK, _NEW}  # lost+found is in the root of a file system


class DiskDirectory:
    """Opened and locked; ``Rejected`` if it cannot be used. ``close`` unlocks it."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_format()
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Rejected(FIELD, f"{path} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write_format()
        except BlockingIOError as error:
            os.close(self._lock)
            raise Rejected(
                FIELD, f"{path} is in use by another store: give each its own"
            ) from error
        except OSError as error:
            os.close(self._lock)
            raise Rejected(FIELD, f"{path} cannot be used: {error.strerror}") from error

    def close(self) -> None:
        """Unlock the directory."""
        os.close(self._lock)

    def file(self, segment: int) -> Path:
        """The path of a segment's file."""
        return self.path / f"segment-{segment:016x}"

    def segments(self) -> list[tuple[int, int]]:
        """Numbers and bytes of the segment files, least recently used first.

        One that another thread removes meanwhile is left out.
        """
        found = []
        for entry in os.scandir(self.path):
            if (match := _OURS.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, int(match[1], 16), status.st_size))
        return [(segment, size) for _, segment, size in sorted(found)]

    def used(self, segment: int) -> None:
        """Record the use of a segment in its file's time, for later starts."""
        now = time.time_ns()  # more precise than the system's own stamp
        with contextlib.suppress(OSError):
            os.utime(self.file(segment), ns=(now, now))

    def remove(self, segment: int) -> None:
        """Remove a segment's file, if it exists."""
        with contextlib.suppress(OSError):
            self.file(segment).unlink()

    def _check_format(self) -> None:
        names = {entry.name for entry in os.scandir(self.path)} - _ALLOWED
        if _FORMAT not in names:
            if names:
                raise Rejected(FIELD, f"{self.path} holds other files: give an empty directory")
            return
        if (written := self._written()) not in _READABLE:
            raise Rejected(
                FIELD,
                f"{self.path} was written as {written.strip()!r} and this is {FORMAT.strip()!r}:"
                " give another directory, or empty it",
            )

    def _write_format(self) -> None:
        path = self.path / _FORMAT
        if path.exists() and self._written() == FORMAT:
            return
        old = self.segments()
        for segment, _ in old:
            self.remove(segment)
        if old:
            log.warning(
                "disk: %d segments of an older header format were removed from %s",
                len(old),
                self.path,
            )
        new = self.path / _NEW
        new.write_text(FORMAT)
        new.rename(path)

    def _written(self) -> str:
        with (self.path / _FORMAT).open("rb") as file:
            return file.read(200).decode("ascii", "replace")
