"""Detects a thread that hangs, in a device or a lock, while the rest of the process answers.

Time is counted in turns of the watching thread, so a process that was stopped does not hang.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable

TURNS = 20


class Watchdog:
    """Calls ``hangs`` if ``at`` stays the same for ``seconds``; ``None`` means that it is idle."""

    def __init__(
        self, seconds: float, at: Callable[[], int | None], hangs: Callable[[], None]
    ) -> None:
        self._seconds = seconds
        self._at = at
        self._hangs = hangs
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Watch until ``end``; ``hangs`` is called at most once, on the watching thread."""
        self._thread.start()

    def end(self) -> None:
        """Stop watching."""
        self._ending.set()

    def _watch(self) -> None:
        seen, turns = self._at(), 0
        while not self._ending.wait(self._seconds / TURNS):
            now = self._at()
            turns = turns + 1 if now is not None and now == seen else 0
            seen = now
            if turns >= TURNS:
                self._hangs()
                return


def stack_of(thread: threading.Thread) -> str:
    """The stack of a thread now."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "it has ended"
