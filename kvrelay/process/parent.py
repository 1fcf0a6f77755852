"""The end of a process with its parent, where the kernel can see to it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.process import BaseProcess

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process once its parent ends, however that ends. Linux only.

    The kernel watches the thread that started this process: it must live as long as the parent.
    ``parent`` is its process id; if it has ended already, this process ends now.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_creator() -> None:
    """End this process when the process that made it by ``multiprocessing`` ends, however it ends.

    The thread that made it may end before. Without effect on other processes.
    """
    creator = multiprocessing.parent_process()
    if creator is not None:
        threading.Thread(target=_follow, args=(creator,), name="creator", daemon=True).start()


def _follow(creator: BaseProcess) -> None:
    creator.join()
    os.kill(os.getpid(), signal.SIGKILL)
