"""The calls of ``kvrelay.v1.StoreService`` as functions. gRPC errors are mapped here.

Calls that find or move blocks carry the caller's trace to the store. ``Get`` and ``Put`` carry
messages as bytes, see ``kvstore.wire.buffers``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc
import grpc.experimental

from kvrelay.errors import Unavailable
from kvrelay.rpc import tracing
from kvrelay.rpc.channel import ChannelOptions, open_sync_channel
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.status import from_rpc_error
from kvrelay.rpc.tracing import Metadata
from kvrelay.v1 import store_pb2 as pb
from kvrelay.v1.store_pb2_grpc import StoreServiceStub

_READ_IN_PLACE = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)
"""The thread that reads a stream also polls it: a third less time for a small block."""


class _Options(ChannelOptions):
    def arguments(self) -> list[tuple[str, int]]:
        return [*ChannelOptions.arguments(self), _READ_IN_PLACE]


def trace() -> Metadata:
    """The metadata that makes the store's span of a call a child of the caller's span."""
    return tracing.current().metadata


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Map gRPC errors to those of ``kvrelay.errors``."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    except ValueError as error:
        if "closed channel" not in str(error):
            raise
        raise Unavailable("this store was closed") from error


class StoreCalls:
    """One channel. It connects on first use and reconnects when needed."""

    def __init__(self, address: str) -> None:
        self._channel = open_sync_channel(address, _Options())
        self.stub = StoreServiceStub(self._channel)
        self.get: grpc.UnaryStreamMultiCallable[pb.GetRequest, bytes] = self._channel.unary_stream(
            "/kvrelay.v1.StoreService/Get", pb.GetRequest.SerializeToString
        )
        self.put: grpc.StreamUnaryMultiCallable[bytes, pb.PutResponse] = self._channel.stream_unary(
            "/kvrelay.v1.StoreService/Put", None, pb.PutResponse.FromString
        )

    def transports(self, deadline: Deadline) -> pb.GetTransportsResponse:
        """``GetTransports``."""
        with mapped_errors():
            return self.stub.GetTransports(
                pb.GetTransportsRequest(), timeout=deadline.remaining(), metadata=trace()
            )

    def locate(
        self, names: Sequence[bytes], lease_ms: int, deadline: Deadline
    ) -> pb.LocateResponse:
        """``Locate``, with a lease of ``lease_ms``."""
        with mapped_errors():
            return self.stub.Locate(
                pb.LocateRequest(names=names, lease_ms=lease_ms),
                timeout=deadline.remaining(),
                metadata=trace(),
            )

    def reserve(self, request: pb.ReserveRequest, deadline: Deadline) -> pb.ReserveResponse:
        """``Reserve``."""
        with mapped_errors():
            return self.stub.Reserve(request, timeout=deadline.remaining(), metadata=trace())

    def abandon(self, ticket: int, timeout: float) -> None:
        """Abandon the rest of a reservation: a put under its ticket that carries no block."""
        with mapped_errors():
            self.stub.PutSmall(pb.PutSmallRequest(head=pb.PutHead(ticket=ticket)), timeout=timeout)

    def release_lease(self, boot: bytes, lease: int, timeout: float) -> None:
        """``Release`` of one lease."""
        with mapped_errors():
            self.stub.Release(pb.ReleaseRequest(boot=boot, leases=[lease]), timeout=timeout)

    def close(self) -> None:
        """Close the channel; open calls fail."""
        self._channel.close()
