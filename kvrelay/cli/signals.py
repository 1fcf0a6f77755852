"""The signals that end a command, handled in a thread of their own."""

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
    """A context in which every signal of ``NUMBERS`` calls ``on_signal(number)``.

    Python runs handlers in the main thread between two of its instructions. The kernel may deliver
    the signal to any thread; then, or if it arrives just before a blocking call, nothing wakes the
    main thread. So the interpreter writes the number to a pipe, which a thread of its own reads.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        reader, writer = os.pipe()
        self._reader = reader
        self._writer = writer
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()
        self._wakes = signal.set_wakeup_fd(self._writer)
        self._before = {number: signal.signal(number, _ignored) for number in NUMBERS}

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
                    self._on_signal(number[0])


def end_now(cluster: Cluster, number: int) -> None:
    """Kill the cluster and end this process, even while its main thread is blocked."""
    cluster.kill_all()
    spawn.server.end()
    with suppress(OSError):
        os.write(2, b"\n")  # after the ^C of the terminal
    os._exit(128 + number)


def _ignored(number: int, frame: FrameType | None) -> None:
    """Do nothing: the thread of ``Signals`` handles it."""
