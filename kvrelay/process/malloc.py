"""Bounds what the C library's allocator keeps for threads that come and go.

glibc gives threads up to eight arenas a core and gives none back. gRPC's threads grow with the
load: under a flood of rapid resets a server's memory rose without end; with two arenas it stands.
What is free in the midst of an arena goes back to the system only when asked for, so it is, now and
then: half of what broken HTTP/2 left behind was such.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -8, -3, -1  # of malloc.h
MAX_ARENAS = 2
MAX_HEAP_BUFFER = (
    32 << 20
)  # what glibc comes to by itself, in a process that has freed so large a one
TRIM_SECONDS = 30.0


def bound() -> None:
    """For this process; first of all, for an arena that was made stays."""
    if "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(OSError, AttributeError):  # another libc
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, MAX_ARENAS)


def keep_large_buffers() -> None:
    """Buffers of messages lie in the heap, which is given back by ``trim_periodically`` only.

    glibc maps a large one anew each time and gives it back at once: a fault for every page of it,
    which for a stream of megabytes is a third of all its time.
    """
    if os.environ.keys() & {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}:
        return
    with suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BUFFER)
        ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2 * MAX_HEAP_BUFFER)


def trim_periodically(seconds: float = TRIM_SECONDS) -> None:
    """From now on, in a thread that ends with the process; nothing where libc has no such call."""
    with suppress(OSError, AttributeError):  # another libc
        trim = ctypes.CDLL(None).malloc_trim
        threading.Thread(target=_trim, args=(trim, seconds), name="trim", daemon=True).start()


def _trim(trim: Callable[[int], int], seconds: float) -> None:
    while True:
        time.sleep(seconds)
        trim(0)  # without the interpreter's lock
