"""Threads share two arenas of the allocator, and free memory returns to the system."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from kvrelay.process.malloc import MAX_ARENAS

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another libc")
THREADS = 8
# A thread's arena begins at a multiple of 64 MiB; that of the process is its heap.
SCRIPT = f"""
import re, threading
from pathlib import Path
from kvrelay.process import malloc
malloc.limit_arenas()
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
# Every second block is free: the heap cannot be cut at its end.
TRIMMED = """
import re, time
from pathlib import Path
from kvrelay.process import malloc
def held():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
blocks = [bytearray(40_000) for _ in range(4_000)]
del blocks[::2]
before = held()
malloc.trim_periodically(0.05)
until = time.monotonic() + 50
while held() > before - 40_000 and time.monotonic() < until:
    time.sleep(0.05)
print(before - held())
"""
# Of a megabyte, as often as a stream of messages would: two buffers at a time.
CYCLED = """
import resource
from kvrelay.process import malloc
malloc.keep_large_buffers()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
kept = bytearray(b"x") * (1 << 20)
before = faults()
for _ in range(100):
    kept = bytearray(b"x") * (1 << 20)
print(faults() - before)
"""


def arenas(**environ: str) -> int:
    return told(SCRIPT, **environ)


def told(script: str, **environ: str) -> int:
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return int(run.stdout)


def test_threads_share_the_arenas() -> None:
    assert arenas() <= MAX_ARENAS


def test_the_environment_says_otherwise() -> None:
    """This shows that the count of the test above works."""
    assert arenas(MALLOC_ARENA_MAX=str(THREADS * 2)) > MAX_ARENAS


def test_what_is_free_in_the_midst_of_the_heap_goes_back() -> None:
    assert told(TRIMMED) > 40_000


def test_a_buffer_is_used_again() -> None:
    assert told(CYCLED) < 2_000


def test_a_buffer_is_mapped_anew_when_the_environment_says_so() -> None:
    """256 pages each: this shows that the count of the test above works."""
    assert told(CYCLED, MALLOC_MMAP_THRESHOLD_="65536") > 20_000
