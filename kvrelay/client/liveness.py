"""Whether the router still answers, as long as answers of it are under way.

A router that is stopped keeps its connections: its machine confirms whatever is sent to it, and
pings of gRPC get a minute (``kvrelay.rpc.keepalive``). So a client that has heard nothing for a
while asks for the router's health, whatever it may say, and without an answer ends its streams.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

from kvrelay.errors import Unavailable
from kvrelay.rpc.keepalive import MIN_BYTES_PER_SECOND

QUIET_SECONDS = 5.0
ANSWER_SECONDS = 5.0
PROBES = 2  # in a row: in the time of one this very process may have stood still


class WatchedStream(Protocol):
    """A stream: ``transit`` are bytes of its request that may not be there yet."""

    @property
    def open(self) -> bool: ...

    @property
    def transit(self) -> int: ...

    def give_up(self, error: Unavailable) -> None: ...


@dataclass(frozen=True, slots=True)
class LivenessStep:
    """What to do for so many seconds at most: ask the router something, or sleep."""

    seconds: float
    ask: bool


class Liveness:
    """For the streams of one client, of any thread. A stream that is dropped is forgotten."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: WeakSet[WatchedStream] = WeakSet()
        self._watched = False
        self._heard = self._asked = 0.0
        self._unanswered = 0

    def begin(self, stream: WatchedStream) -> bool:
        """Another one is under way; whether somebody has to begin to do its steps."""
        with self._lock:
            if not self._open():
                self.hear()
            self._streams.add(stream)
            begun = not self._watched
            self._watched = True
            return begun

    def hear(self) -> None:
        """A message came."""
        self._heard = time.monotonic()

    def next(self, answered: bool) -> LivenessStep | None:
        """The next step, ``None`` when no stream is left; ``answered``: an answer came in the last.

        For one thread or task, which has to do it.
        """
        if answered:
            self.hear()
        if self._heard > self._asked:
            self._unanswered = 0
        elif self._unanswered >= PROBES:
            self._give_up(time.monotonic() - self._heard)
            self._unanswered = 0
        if not self._watch():
            return None
        now = time.monotonic()
        if now - self._heard < QUIET_SECONDS:
            return LivenessStep(QUIET_SECONDS - (now - self._heard), ask=False)
        self._asked = now
        self._unanswered = self._unanswered + 1
        return LivenessStep(ANSWER_SECONDS + self._transit(), ask=True)

    def _open(self) -> list[WatchedStream]:
        return [stream for stream in self._streams if stream.open]

    def _watch(self) -> bool:
        with self._lock:
            self._watched = bool(self._open())
            return self._watched

    def _transit(self) -> float:
        with self._lock:
            return sum(stream.transit for stream in self._open()) / MIN_BYTES_PER_SECOND

    def _give_up(self, seconds: float) -> None:
        silent = f"the router was silent for {seconds:.0f} s"
        with self._lock:
            lost = self._open()
        for stream in lost:
            stream.give_up(Unavailable(f"{silent}: resume the answer, there or at another one"))
