"""Processes that end with the one that started them, however that ends."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def start_child(command: Sequence[str], stdout: int | None = None) -> subprocess.Popen[str]:
    """Start one, from the main thread. Only on Linux does it end when we are killed."""
    return subprocess.Popen(command, stdout=stdout, text=True, preexec_fn=_end_with_parent)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
