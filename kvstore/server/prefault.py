"""Creates the arena's pages in the background: the first touch of a page costs ten copies.

It goes from the start of the arena on, in small steps at the lowest priority, while the store
serves. Stored bytes do not change.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time

from kvrelay.config.values import show_bytes

log = logging.getLogger("kvrelay.store")

STEP = 4 << 20
REPORT_SECONDS = 30.0
MADV_POPULATE_WRITE = 23


class Prefault:
    """A thread that touches ``memory``; ``stop`` ends it early."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefault", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End after the current step."""
        self._stop.set()

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end; returns whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if sys.platform != "linux":
            return
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        began = reported = time.monotonic()
        total = len(self._memory)
        for start in range(0, total, STEP):
            if _memory_is_short():
                log.warning("arena: memory is short; the rest is touched on first use")
                return
            if self._stop.is_set() or not _populate(self._memory[start : start + STEP]):
                return
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                log.info("arena: %d %% of %s touched", 100 * start // total, show_bytes(total))
        log.info("arena: %s touched in %.1f s", show_bytes(total), time.monotonic() - began)


def _memory_is_short() -> bool:
    """Whether less than a tenth of the machine's memory is left."""
    with open("/proc/meminfo", encoding="ascii") as file:
        sizes = {name: int(rest.split()[0]) for name, _, rest in (s.partition(":") for s in file)}
    return sizes.get("MemAvailable", 1) < sizes.get("MemTotal", 0) // 10


def _populate(memory: memoryview) -> bool:
    """Create the pages; false if the system cannot do it without changing their content."""
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    size = ctypes.c_size_t(len(memory))
    return bool(libc.madvise(ctypes.c_void_p(address), size, MADV_POPULATE_WRITE) == 0)
