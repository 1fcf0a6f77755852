"""Threads share two arenas of the allocator, so that what floods leave behind is bounded."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from common.arenas import MOST

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another libc")
THREADS = 8
# A thread's arena begins at a multiple of 64 MiB; that of the process is its heap.
SCRIPT = f"""
import re, threading
from pathlib import Path
from common import arenas
arenas.bound()
inside, over = threading.Barrier({THREADS + 1}), threading.Event()
def hold():
    kept = [bytearray(50_000) for _ in range(20)]
    inside.wait()
    over.wait()
for _ in range({THREADS}):
    threading.Thread(target=hold).start()
inside.wait()
maps = Path("/proc/self/maps").read_text()
starts = re.findall(r"^([0-9a-f]+)-\\S+ rw-p 0+ 00:00 0 *$", maps, re.M)
print(1 + sum(int(start, 16) % (1 << 26) == 0 for start in starts))
over.set()
"""


def arenas(**environ: str) -> int:
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return int(told.stdout)


def test_threads_share_the_arenas() -> None:
    assert arenas() <= MOST


def test_the_environment_says_otherwise() -> None:
    """And the count above is not blind."""
    assert arenas(MALLOC_ARENA_MAX=str(THREADS * 2)) > MOST
