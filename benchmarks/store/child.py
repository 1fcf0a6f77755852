"""Child processes that end with their parent, however the parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from kvrelay.cluster.layout import import_path

PR_SET_PDEATHSIG = 1


def start_child(command: Sequence[str], stdout: int | None = None) -> subprocess.Popen[str]:
    """Start a process, from the main thread. Only on Linux does it end when this one is killed."""
    environ = {**os.environ, **import_path(os.environ)}
    return subprocess.Popen(
        command, stdout=stdout, text=True, env=environ, preexec_fn=_end_with_parent
    )


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
