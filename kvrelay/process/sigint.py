"""What a Ctrl-C does to a process that has nothing to put in order: it ends, and says nothing.

The first import of every program, and it imports next to nothing: what a program imports after it
takes seconds, and a ``KeyboardInterrupt`` in there is a traceback or gets lost.
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

STATUS = 128 + signal.SIGINT


def ends() -> None:
    """From now on it ends this process at once, with status 130.

    Until the interpreter comes to its own end, where it would die of one and lose its status.
    """
    _no_more_at_exit()
    signal.signal(signal.SIGINT, _end)


def ending() -> AbstractContextManager[None]:
    """Meanwhile it does that, as while much is imported."""
    return _meanwhile(_end)


def raised() -> AbstractContextManager[None]:
    """Meanwhile it is a ``KeyboardInterrupt``, for what has something to put in order."""
    return _meanwhile(signal.default_int_handler)


@contextmanager
def _meanwhile(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # none comes here
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@cache
def _no_more_at_exit() -> None:
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # the first one is called last


def _end(number: int, frame: FrameType | None) -> object:
    os._exit(STATUS)
