"""Whether the router still answers while streams from it are open.

The connections of a stopped router stay up: its kernel acknowledges data, and gRPC's pings time out
only after a minute (``kvrelay.rpc.keepalive``). So after ``QUIET_SECONDS`` without a message the
client sends health checks. Any response counts, even an error. After ``PROBES`` checks without a
response the client ends its streams.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

import grpc

from kvrelay.errors import DeadlineExceeded, Unavailable
from kvrelay.rpc.keepalive import MIN_BYTES_PER_SECOND
from kvrelay.rpc.status import from_rpc_error

QUIET_SECONDS = 5.0
ANSWER_SECONDS = 5.0
PROBES = 2  # in a row: this process itself may have been stopped during one of them
HEALTH = "/grpc.health.v1.Health/Check"


class WatchedStream(Protocol):
    """A stream; ``transit`` is the number of request bytes that may still be on their way."""

    @property
    def open(self) -> bool: ...

    @property
    def transit(self) -> int: ...

    def give_up(self, error: Unavailable) -> None: ...


@dataclass(frozen=True, slots=True)
class LivenessStep:
    """What to do for at most ``seconds``: probe the router if ``probe``, else sleep."""

    seconds: float
    probe: bool


class Liveness:
    """Watches the streams of one client; thread-safe. Streams are held weakly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: WeakSet[WatchedStream] = WeakSet()
        self._watched = False
        self._heard = 0.0
        self._probed = 0.0
        self._unanswered = 0

    def begin(self, stream: WatchedStream) -> bool:
        """Watch another stream. Returns whether the caller has to start carrying out the steps."""
        with self._lock:
            if not self._open():
                self.note_message()
            self._streams.add(stream)
            first = not self._watched
            self._watched = True
            return first

    def note_message(self) -> None:
        """Note that the router sent a message."""
        self._heard = time.monotonic()

    def next(self, answered: bool) -> LivenessStep | None:
        """The next step, ``None`` once no stream is open. ``answered``: the last probe succeeded.

        One thread or task calls this and carries out the steps.
        """
        if answered:
            self.note_message()
        if self._heard > self._probed:
            self._unanswered = 0
        elif self._unanswered >= PROBES:
            self._give_up(time.monotonic() - self._heard)
            self._unanswered = 0
        if not self._watch():
            return None
        now = time.monotonic()
        if now - self._heard < QUIET_SECONDS:
            return LivenessStep(QUIET_SECONDS - (now - self._heard), probe=False)
        self._probed = now
        self._unanswered += 1
        return LivenessStep(ANSWER_SECONDS + self._transit(), probe=True)

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
            stream.give_up(Unavailable(f"{silent}: resume the stream, there or at another router"))


async def responds(channel: grpc.aio.Channel, seconds: float) -> bool:
    """Whether the server responds to a health check within ``seconds``, even with an error."""
    check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HEALTH)
    try:
        await check(b"", timeout=seconds)
    except grpc.RpcError as error:
        return not isinstance(from_rpc_error(error), DeadlineExceeded)
    return True


def responds_sync(channel: grpc.Channel, seconds: float) -> bool:
    """``responds`` for threads."""
    check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HEALTH)
    try:
        check(b"", timeout=seconds)
    except grpc.RpcError as error:
        return not isinstance(from_rpc_error(error), DeadlineExceeded)
    return True
