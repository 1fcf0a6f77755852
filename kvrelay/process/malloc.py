"""Bounds the memory that glibc's allocator keeps for short-lived threads.

glibc gives threads up to eight arenas a core and returns none to the system. gRPC starts threads
with the load: under a flood of rapid resets a server's memory grew without end; with two arenas it
stays constant. Free memory inside an arena is returned only on request, so a thread requests it
every half a minute.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

M_TRIM_THRESHOLD = -1  # of malloc.h
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
MAX_ARENAS = 2
MAX_HEAP_BUFFER = 32 << 20  # the bound that glibc itself reaches once a block this large was freed
TRIM_SECONDS = 30.0


def limit_arenas() -> None:
    """Bound the arenas of this process. Call it first: arenas are never removed."""
    if "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(OSError, AttributeError):  # another libc
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, MAX_ARENAS)


def keep_large_buffers() -> None:
    """Keep message buffers in the heap; only ``trim_periodically`` returns them to the system.

    glibc maps a large buffer anew each time and unmaps it at once: a page fault for every page,
    which is a third of the time of a stream of megabytes.
    """
    if os.environ.keys() & {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}:
        return
    with suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BUFFER)
        ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2 * MAX_HEAP_BUFFER)


def trim_periodically(seconds: float = TRIM_SECONDS) -> None:
    """Start a daemon thread that trims the heap; does nothing if the C library cannot."""
    with suppress(OSError, AttributeError):  # another libc
        trim = ctypes.CDLL(None).malloc_trim
        threading.Thread(target=_trim, args=(trim, seconds), name="trim", daemon=True).start()


def _trim(trim: Callable[[int], int], seconds: float) -> None:
    while True:
        time.sleep(seconds)
        trim(0)  # releases the interpreter's lock
