"""The start of a supervised process: it runs a module and never outlives its supervisor.

``python -P -m kvrelay.cluster.child FD MODULE ARGS...`` watches its end of a pipe whose other end
only the supervisor holds. When the supervisor ends, even by SIGKILL, the process sends itself
SIGTERM, and after ``GRACE_SECONDS`` kills its process group. Until it ends it reserves the ports of
its cluster: the others may still send their token there.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading

from kvrelay.rpc import reserved

GRACE_SECONDS = 5.0
PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Run ``MODULE`` as ``__main__`` in this process, with a thread that watches the pipe."""
    lifeline, module = int(argv[0]), argv[1]
    if sys.platform == "linux":  # a stopped process (SIGSTOP) cannot read its pipe: continue it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    threading.Thread(target=_watch, args=(lifeline,), name="lifeline", daemon=True).start()
    held = reserved.join(os.environ)
    sys.argv = [module, *argv[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    del held  # not before the module has ended


def _watch(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE_SECONDS)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
