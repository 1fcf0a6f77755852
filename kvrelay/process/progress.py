"""What a slow piece of work is doing, logged every few seconds; nothing if it is quick."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType

log = logging.getLogger(__name__)
SECONDS = 3.0


class Progress:
    """A context in which the current ``phase`` is logged every ``seconds``."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.phase = "starting"
        self._seconds = seconds
        self._since = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _report(self) -> None:
        while not self._ended.wait(self._seconds):
            log.info("%s (%.0f s so far)", self.phase, time.monotonic() - self._since)
