"""What the streams for threads and for asyncio have in common."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import grpc

from kvrelay.client.chunk import Chunk, ResumeState
from kvrelay.client.liveness import Liveness
from kvrelay.client.parameters import parameter_error
from kvrelay.errors import KvrelayError, Unavailable
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import router_pb2


class Cancellable(Protocol):
    """The part of a gRPC call that both kinds of stream use."""

    def cancel(self) -> object: ...


C = TypeVar("C", bound=Cancellable)


class BaseStream(Generic[C]):
    """A call, what it received, and why it ended: cancelled by the client, or a silent router."""

    def __init__(self, request: router_pb2.GenerateRequest, call: C, liveness: Liveness) -> None:
        self._call = call
        self._liveness = liveness
        self._received = ResumeState(request)
        self._cancelled = False
        self._lost: Unavailable | None = None

    @property
    def transit(self) -> int:
        """Bytes of the request that the router may not have received yet."""
        return self._received.unanswered

    def give_up(self, error: Unavailable) -> None:
        """End the stream with this error: the router is silent."""
        self._lost = error
        self._call.cancel()

    def continued(self) -> router_pb2.GenerateRequest:
        """The request that resumes this stream; ``Rejected`` if its answer has ended."""
        return self._received.continued()

    def cancel(self) -> None:
        """Cancel the request; no effect on an answer that has ended."""
        self._cancelled = True
        self._call.cancel()

    def _failure(self, error: grpc.RpcError) -> KvrelayError:
        """Why the stream ended early; of a ``Rejected``, the client's parameter."""
        return self._lost or parameter_error(from_rpc_error(error))

    def _take(self, message: router_pb2.GenerateResponse) -> Chunk:
        self._liveness.note_message()
        return self._received.take(message)
