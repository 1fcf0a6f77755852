"""The client library for asyncio: the same methods as ``kvrelay.client.client``, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Self, TypeAlias

import grpc

from kvrelay.client.chunk import Chunk, Completion, completion_of
from kvrelay.client.connection import BaseClient
from kvrelay.client.convert import fleet_of
from kvrelay.client.liveness import Liveness, responds
from kvrelay.client.parameters import Parameters, seconds_of, takes_parameters
from kvrelay.client.stream import BaseStream
from kvrelay.errors import Unavailable
from kvrelay.fleet import FleetStatus, WorkerStatus
from kvrelay.rpc.channel import ChannelOptions, open_channel
from kvrelay.rpc.status import checked_response, from_rpc_error
from kvrelay.v1 import router_pb2, router_pb2_grpc

GenerateCall: TypeAlias = (
    "grpc.aio.UnaryStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]"
)


class AsyncStream(BaseStream["GenerateCall"], AsyncIterator[Chunk]):
    """A streamed answer. ``aclose``, ``async with`` or dropping the stream cancels the request."""

    def __init__(
        self, request: router_pb2.GenerateRequest, call: GenerateCall, liveness: Liveness
    ) -> None:
        super().__init__(request, call, liveness)
        self._messages = aiter(call)

    async def __anext__(self) -> Chunk:
        """Raises ``KvrelayError`` if the stream cannot continue."""
        if self._cancelled:
            raise StopAsyncIteration
        try:
            message = checked_response(await anext(self._messages), "the router")
        except grpc.RpcError as error:
            if self._received.ended:
                raise StopAsyncIteration from None
            raise self._failure(error) from error
        except asyncio.CancelledError:  # either this task or only its call was cancelled
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if self._cancelled or self._received.ended:
                raise StopAsyncIteration from None
            raise self._lost or Unavailable(
                "the client was closed before the answer ended"
            ) from None
        return self._take(message)

    @property
    def open(self) -> bool:
        """Whether more chunks may follow."""
        return self._lost is None and not self._call.done()

    async def aclose(self) -> None:
        """Cancel the request; ``contextlib.aclosing`` calls this."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._call.done():  # dropped, for example after `break`
            self._call.cancel()


class AsyncClient(BaseClient):
    """A connection to a router. Create, use and close it in one event loop."""

    def _connect(self, address: str, options: ChannelOptions) -> None:
        self._channel = open_channel(address, options)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)
        self._watching: asyncio.Task[None] | None = None

    @takes_parameters(Parameters)
    def generate(self, parameters: Parameters) -> AsyncStream:
        """Generates an answer and streams its chunks as they are made.

        Raises ``Rejected`` at once for invalid parameters; reading the stream raises other errors.
        """
        return self._start(parameters.message(), parameters.timeout)

    @takes_parameters(Parameters)
    async def complete(self, parameters: Parameters) -> Completion:
        """Generates an answer and waits until it is complete."""
        async with self._start(parameters.message(), parameters.timeout) as stream:
            return completion_of([chunk async for chunk in stream])

    def resume(self, stream: AsyncStream, timeout: float | None = None) -> AsyncStream:
        """Continues a broken stream after its last token; no token is repeated.

        The stream may belong to another client. Raises ``Rejected`` if its answer has ended.
        """
        return self._start(self._continued(stream), timeout)

    async def workers(self, timeout: float | None = 10.0) -> tuple[WorkerStatus, ...]:  # noqa: ASYNC109 - the call's deadline
        """The workers that this router knows."""
        return (await self.fleet(timeout)).workers

    async def fleet(self, timeout: float | None = 10.0) -> FleetStatus:  # noqa: ASYNC109 - the call's deadline
        """The workers that this router knows, and its queue."""
        self._check_open()
        request, limit = router_pb2.ListWorkersRequest(), seconds_of(timeout)
        try:
            return fleet_of(await self._stub.ListWorkers(request, timeout=limit))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def close(self) -> None:
        """Close the connection; open streams are cancelled."""
        self._closed.set()
        if self._watching is not None:
            self._watching.cancel()
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _start(self, request: router_pb2.GenerateRequest, timeout: float | None) -> AsyncStream:
        self._check_request(request)
        call = self._stub.Generate(request, timeout=seconds_of(timeout))
        stream = AsyncStream(request, call, self._liveness)
        if self._liveness.begin(stream):
            watching = _watch(self._liveness, self._channel)
            self._watching = asyncio.get_running_loop().create_task(watching)
        return stream


async def _watch(liveness: Liveness, channel: grpc.aio.Channel) -> None:
    answered = False
    while (step := liveness.next(answered)) is not None:
        answered = step.probe and await responds(channel, step.seconds)
        if not step.probe:
            await asyncio.sleep(step.seconds)
