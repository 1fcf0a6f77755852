"""How a supervised process starts: it runs a module and never outlives who started it.

``python -m kvrelay.child FD MODULE ARGS...`` watches the read end of a pipe whose other end only
the supervisor holds. When that closes, even by SIGKILL, the process asks itself to end, and is
ended with its whole group if it does not. No other process may hold that end: see ``process``.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection

GRACE_SECONDS = 5.0
PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Runs ``MODULE`` as ``__main__`` in this process, under the eye of the pipe."""
    lifeline, module = int(argv[0]), argv[1]
    _wake_when_parent_dies()
    threading.Thread(target=_watch, args=(lifeline,), name="lifeline", daemon=True).start()
    sys.argv = [module, *argv[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def forked(
    lifeline: Connection,
    output: Connection,
    module: str,
    args: tuple[str, ...],
    environ: Mapping[str, str],
) -> None:
    """The same in a process forked from one that has loaded much of what ``module`` needs."""
    os.setsid()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    _close_all_but(0, 1, 2, lifeline.fileno())
    os.environ.clear()
    os.environ.update(environ)
    main([str(lifeline.fileno()), module, *args])


def _close_all_but(*kept: int) -> None:
    """The fork server lives as long as somebody holds its pipe, and we got an end of it."""
    for name in os.listdir("/dev/fd"):
        if int(name) not in kept:
            with suppress(OSError):  # the one of the listing itself
                os.close(int(name))


def _wake_when_parent_dies() -> None:
    """A stopped process (SIGSTOP) cannot read its pipe: let the kernel continue it first."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)


def _watch(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE_SECONDS)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
