"""The signals that end a command, heard in a thread of their own."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType

from kvrelay.cluster import spawn
from kvrelay.cluster.supervisor import Cluster

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Meanwhile each of them calls ``heard(number)``.

    Python runs handlers in the main thread, when that gets round to it. The kernel may give the
    signal to any thread, and then, or when it comes just before a call that blocks, nothing wakes
    the main one: what it waits for never comes. So the number is written to a pipe where the signal
    arrives, by the interpreter, and read by a thread that does nothing else.
    """

    def __init__(self, heard: Callable[[int], None]) -> None:
        self._heard = heard
        reader, writer = os.pipe()
        self._reader = reader
        self._writer = writer
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()
        self._wakes = signal.set_wakeup_fd(self._writer)
        self._before = {number: signal.signal(number, _noted) for number in NUMBERS}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakes)
        os.close(self._writer)
        self._thread.join()

    def _listen(self) -> None:
        with os.fdopen(self._reader, "rb", buffering=0) as stream:
            while number := stream.read(1):
                if number[0] in NUMBERS:
                    self._heard(number[0])


def end_now(cluster: Cluster, number: int) -> None:
    """Kills all of it and ends this process, whatever its main thread does."""
    cluster.kill_all()
    spawn.server.end()
    with suppress(OSError):
        os.write(2, b"\n")  # after the ^C of the terminal
    os._exit(128 + number)


def _noted(number: int, frame: FrameType | None) -> None:
    """The thread hears it."""
