"""Cores that the workers of one machine share: a worker that computes alone uses all of them.

The workers map one file, in which each has a byte that says whether it computes. At the start of a
step, and of each layer in compiled code, a worker divides the cores by the number of workers that
compute. The byte of a worker that was killed while it computed stays set until another one starts:
the others use fewer cores then.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import weakref
from collections.abc import Callable
from contextlib import suppress

from kvrelay.errors import Rejected

WORKERS = 256
_COMPUTES = 1


class CoresView(ctypes.Structure):
    """What compiled code reads, as ``Cores`` of forward.h: ``computing`` is an address."""

    _fields_ = (
        ("computing", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("workers", "share", "most", "cores")),
    )


class SharedCores:
    """One worker's place in the file; a process has at most one for each file.

    ``share`` threads are always its own, ``cores`` are all that the workers share.
    """

    def __init__(self, path: str, share: int, cores: int) -> None:
        """Create the file if it is missing. ``Rejected`` if it cannot be used."""
        self._share = share
        self._cores = cores
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _rejected(path, error.strerror) from error
        try:
            found = os.fstat(self._file)
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("it is not a file")
            size = found.st_size
            if size > WORKERS or not set(os.pread(self._file, WORKERS, 0)) <= {0, _COMPUTES}:
                raise ValueError("it has other content")
            if size < WORKERS:
                os.pwrite(self._file, b"\0", WORKERS - 1)  # the map needs bytes, not a hole
            self._computing = mmap.mmap(self._file, WORKERS)
            self._place = self._take_place()
        except (OSError, ValueError) as error:
            os.close(self._file)
            raise _rejected(path, error) from error
        computing = ctypes.addressof((ctypes.c_uint8 * WORKERS).from_buffer(self._computing))
        self.view = CoresView(computing, WORKERS, share, share, cores)

    def _take_place(self) -> int:
        """The first byte whose lock no process holds; the lock ends with this process.

        Clears every such byte: its worker has ended.
        """
        own: int | None = None
        for place in range(WORKERS):
            with suppress(BlockingIOError, PermissionError):
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                self._computing[place] = 0
                if own is None:
                    own = place
                else:
                    fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)
        if own is None:
            raise ValueError(f"{WORKERS} workers share it already")
        return own

    def compute(self, most: int) -> int:
        """A step begins, which can use ``most`` threads: the number that it gets."""
        self._computing[self._place] = _COMPUTES
        self.view.most = most
        return min(most, max(self._share, self._cores // sum(self._computing[:])))

    def rest(self) -> None:
        """There is nothing to compute: others may use the cores."""
        self._computing[self._place] = 0

    def close(self) -> None:
        """Leave the place to another worker; no step may run any more."""
        self.rest()
        self._computing.close()
        os.close(self._file)


def _rejected(path: str, why: object) -> Rejected:
    return Rejected("shared_cores", f"{path!r}: {why}: name a new file in a folder that exists")


class SharedCoresFile:
    """A file for ``SharedCores`` in memory, which processes of this user open as ``path``.

    Linux only: elsewhere ``path`` is ``None``, and where ``/proc`` cannot be read. ``close`` is
    called at the latest when this object is freed; the workers keep what they have mapped.
    """

    def __init__(self) -> None:
        self.path: str | None = None
        self.close: Callable[[], object] = lambda: None
        if not hasattr(os, "memfd_create"):
            return
        file = os.memfd_create("kvrelay-cores")
        self.close = weakref.finalize(self, os.close, file)
        path = f"/proc/{os.getpid()}/fd/{file}"
        if os.access(path, os.R_OK | os.W_OK):
            self.path = path
