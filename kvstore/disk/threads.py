"""A thread of the disk tier that can be stopped."""

from __future__ import annotations

import threading


class StoppableThread(threading.Thread):
    """A daemon thread; ``run`` ends soon after ``stopping`` is set, with its current step."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.stopping = threading.Event()

    def stop(self) -> None:
        """End after the current step."""
        self.stopping.set()
