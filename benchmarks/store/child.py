"""Child processes that end with their parent, however the parent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from kvrelay.installation import import_path

PR_SET_PDEATHSIG = 1
_END_WITH_PARENT = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):  # else the parent has ended before prctl
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def start_child(command: Sequence[str], stdout: int | None = None) -> subprocess.Popen[str]:
    """Start a process, from the main thread. Only on Linux does it end when this one is killed."""
    environ = {**os.environ, **import_path(os.environ)}
    # Not by preexec_fn: it needs a real fork, in whose child gRPC's handlers may fail.
    words = [sys.executable, "-ISc", _END_WITH_PARENT, str(os.getpid()), *command]
    return subprocess.Popen(
        words if sys.platform == "linux" else command, stdout=stdout, text=True, env=environ
    )
