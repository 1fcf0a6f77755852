"""Ctrl-C in a process that has nothing to clean up: it exits at once, without a traceback.

Every program imports this module first, and it imports little: the imports after it take seconds,
and a ``KeyboardInterrupt`` within one of them is a traceback or gets lost.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import FrameType

INTERRUPTED_STATUS = 128 + signal.SIGINT


def exit_on_sigint() -> None:
    """Let SIGINT end this process at once with status 130.

    When the interpreter shuts down SIGINT is ignored, so that it cannot change the status.
    """
    _ignore_at_exit()
    signal.signal(signal.SIGINT, _exit)


def sigint_exits() -> AbstractContextManager[None]:
    """Within the block SIGINT ends the process: for slow imports of a command."""
    return _handling(_exit)


def sigint_raises() -> AbstractContextManager[None]:
    """Within the block SIGINT raises ``KeyboardInterrupt``: for code that has to clean up."""
    return _handling(signal.default_int_handler)


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs signal handlers in the main thread only
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@cache
def _ignore_at_exit() -> None:
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # registered first, called last


def _exit(number: int, frame: FrameType | None) -> object:
    os._exit(INTERRUPTED_STATUS)
