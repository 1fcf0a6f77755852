"""An answer under way: what a stream for threads and one for asyncio have in common."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from kvrelay.client.chunk import Chunk, ResumeState
from kvrelay.client.liveness import Liveness
from kvrelay.errors import Unavailable
from kvrelay.v1 import router_pb2


class Cancellable(Protocol):
    """What is needed of the call under it; each stream asks more of its own."""

    def cancel(self) -> object: ...


C = TypeVar("C", bound=Cancellable)


class BaseStream(Generic[C]):
    """What came of it, whether it was closed here, and whether its router was given up."""

    def __init__(self, request: router_pb2.GenerateRequest, call: C, pulse: Liveness) -> None:
        self._call = call
        self._pulse = pulse
        self._received = ResumeState(request)
        self._closed = False
        self._lost: Unavailable | None = None

    @property
    def transit(self) -> int:
        """Bytes of the request that may still be under way."""
        return self._received.unanswered

    def give_up(self, error: Unavailable) -> None:
        """The router is silent."""
        self._lost = error
        self._call.cancel()

    def continued(self) -> router_pb2.GenerateRequest:
        """The request that goes on where this stream stopped; ``Rejected`` if it has ended."""
        return self._received.continued()

    def _take(self, message: router_pb2.GenerateResponse) -> Chunk:
        self._pulse.hear()
        return self._received.take(message)

    def _cancel(self) -> None:
        self._closed = True
        self._call.cancel()
