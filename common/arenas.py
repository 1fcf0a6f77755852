"""Bounds what the C library's allocator keeps for threads that come and go.

glibc gives threads up to eight arenas a core and gives none back. gRPC's threads grow with the
load: under a flood of rapid resets a server's memory rose without end; with two arenas it stands.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

M_ARENA_MAX = -8  # of malloc.h
MOST = 2


def bound() -> None:
    """For this process; first of all, for an arena that was made stays."""
    if "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(OSError, AttributeError):  # another libc
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, MOST)
