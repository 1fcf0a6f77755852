"""How this router calls one worker: over gRPC, or over HTTP a server that is not ours."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Protocol, TypeVar

import grpc

from kvrelay.rpc.channel import ChannelOptions, open_channel
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.health import is_serving
from kvrelay.rpc.protocol import SERVICES, Role
from kvrelay.rpc.status import checked_response, from_rpc_error
from kvrelay.rpc.tracing import Metadata
from kvrelay.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

R = TypeVar("R", covariant=True)


class LegStream(Protocol[R]):
    """The responses of a leg; the call of ``grpc.aio`` is one."""

    def initial_metadata(self) -> Awaitable[object]:
        """Returns once the worker has received the leg, or the call has ended."""

    def done(self) -> bool: ...
    def cancel(self) -> bool: ...
    def __aiter__(self) -> AsyncIterator[R]: ...


class WorkerLink(Protocol):
    """Calls of one worker. They raise ``KvrelayError``, legs also ``grpc.RpcError``."""

    @property
    def connected(self) -> bool:
        """Whether a connection is up: if it breaks now, the worker may have died."""

    async def load(self, deadline: Deadline) -> worker_pb2.WorkerLoad: ...
    async def info(self, deadline: Deadline) -> worker_pb2.WorkerInfo: ...
    async def serving(self, role: Role, deadline: Deadline) -> bool: ...

    def prefill(
        self, request: prefill_pb2.PrefillRequest, timeout: float, metadata: Metadata
    ) -> LegStream[prefill_pb2.PrefillResponse]: ...

    def decode(
        self, request: decode_pb2.DecodeRequest, timeout: float, metadata: Metadata
    ) -> LegStream[decode_pb2.DecodeResponse]: ...

    async def close(self) -> None: ...


class GrpcLink:
    """A worker of kvrelay."""

    def __init__(self, address: str, options: ChannelOptions) -> None:
        self._address = address
        self._channel = open_channel(address, options)
        self.control = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._prefill = prefill_pb2_grpc.PrefillServiceStub(self._channel)
        self._decode = decode_pb2_grpc.DecodeServiceStub(self._channel)

    @property
    def connected(self) -> bool:
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def load(self, deadline: Deadline) -> worker_pb2.WorkerLoad:
        request = worker_pb2.GetLoadRequest()
        try:
            answer = await self.control.GetLoad(request, timeout=deadline.remaining())
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return checked_response(answer, self._address).load

    async def info(self, deadline: Deadline) -> worker_pb2.WorkerInfo:
        request = worker_pb2.GetInfoRequest()
        try:
            answer = await self.control.GetInfo(request, timeout=deadline.remaining())
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return checked_response(answer, self._address).info

    async def serving(self, role: Role, deadline: Deadline) -> bool:
        return await is_serving(self._channel, deadline, SERVICES[role])

    def prefill(
        self, request: prefill_pb2.PrefillRequest, timeout: float, metadata: Metadata
    ) -> LegStream[prefill_pb2.PrefillResponse]:
        return self._prefill.Prefill(request, timeout=timeout, metadata=metadata)

    def decode(
        self, request: decode_pb2.DecodeRequest, timeout: float, metadata: Metadata
    ) -> LegStream[decode_pb2.DecodeResponse]:
        return self._decode.Decode(request, timeout=timeout, metadata=metadata)

    async def close(self) -> None:
        await self._channel.close()
