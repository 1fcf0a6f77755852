"""The client library for asyncio: the same calls as ``kvrelay.client.client``, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self, TypeAlias, Unpack

import grpc

from kvrelay.client.access import Access, secured
from kvrelay.client.chunk import Chunk, Completion, completion_of
from kvrelay.client.liveness import Liveness
from kvrelay.client.parameters import Parameters, check_open, request_of, seconds_of
from kvrelay.client.stream import BaseStream
from kvrelay.errors import Unavailable
from kvrelay.rpc.address import DEFAULT_ROUTER
from kvrelay.rpc.channel import ChannelOptions, open_channel
from kvrelay.rpc.health import answers
from kvrelay.rpc.status import checked_response, from_rpc_error
from kvrelay.v1 import router_pb2, router_pb2_grpc

MAX_MESSAGE_BYTES = 32 << 20
Call: TypeAlias = (
    "grpc.aio.UnaryStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]"
)


class AsyncStream(BaseStream["Call"], AsyncIterator[Chunk]):
    """An answer under way. ``aclose``, ``async with``, or dropping it cancels the work."""

    def __init__(self, request: router_pb2.GenerateRequest, call: Call, pulse: Liveness) -> None:
        super().__init__(request, call, pulse)
        self._messages = aiter(call)

    async def __anext__(self) -> Chunk:
        """Raises a ``KvrelayError`` when the answer cannot be gone on with."""
        if self._closed:
            raise StopAsyncIteration
        try:
            message = checked_response(await anext(self._messages), "the router")
        except grpc.RpcError as error:
            if self._received.ended:
                raise StopAsyncIteration from None
            raise self._lost or from_rpc_error(error) from error
        except asyncio.CancelledError:  # of this task, or only of the call under it
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if self._closed or self._received.ended:
                raise StopAsyncIteration from None
            raise self._lost or Unavailable(
                "the client was closed while the answer was under way"
            ) from None
        return self._take(message)

    @property
    def open(self) -> bool:
        """Whether more may come."""
        return self._lost is None and not self._call.done()

    def cancel(self) -> None:
        """Cancel what is under way; without effect on an answer that has ended."""
        self._cancel()

    async def aclose(self) -> None:
        """As ``cancel``: for ``aclosing`` and those who expect it."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._call.done():  # dropped: after a `break`, say
            self._call.cancel()


class AsyncClient:
    """A connection to a router, for one event loop; make it there and close it there."""

    def __init__(
        self,
        address: str = DEFAULT_ROUTER,
        options: ChannelOptions | None = None,
        **access: Unpack[Access],
    ) -> None:
        """``token`` and ``tls_ca`` say who asks and whom to trust: see ``Access``.

        Nothing is sent before the first request.
        """
        chosen = secured(options or ChannelOptions(max_message_bytes=MAX_MESSAGE_BYTES), access)
        self._channel = open_channel(address, chosen)
        self._stub = router_pb2_grpc.RouterStub(self._channel)
        self._pulse = Liveness()
        self._watching: asyncio.Task[None] | None = None
        self._closed = False

    def generate(self, timeout: float | None = None, **ask: Unpack[Parameters]) -> AsyncStream:
        """Ask; ``async for`` the pieces. ``timeout`` in seconds is for the whole answer."""
        return self._start(request_of(ask), timeout)

    async def complete(self, timeout: float | None = None, **ask: Unpack[Parameters]) -> Completion:  # noqa: ASYNC109 - the call's deadline
        """Ask and wait for the whole answer."""
        async with self.generate(timeout, **ask) as stream:
            return completion_of([piece async for piece in stream])

    def resume(self, stream: AsyncStream, timeout: float | None = None) -> AsyncStream:
        """Go on where ``stream`` was broken off: the same tokens follow, none twice.

        Raises ``Rejected`` for one whose answer has ended.
        """
        stream.cancel()
        return self._start(stream.continued(), timeout)

    async def workers(self, timeout: float = 10.0) -> tuple[router_pb2.WorkerStatus, ...]:  # noqa: ASYNC109 - the call's deadline
        """The workers this router knows."""
        check_open(self._closed)
        try:
            answer = await self._stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return tuple(answer.workers)

    async def close(self) -> None:
        """Close the connection; streams under way are cancelled."""
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _start(self, request: router_pb2.GenerateRequest, timeout: float | None) -> AsyncStream:
        check_open(self._closed)
        call = self._stub.Generate(request, timeout=seconds_of(timeout))
        stream = AsyncStream(request, call, self._pulse)
        if self._pulse.begin(stream):
            watching = _watch(self._pulse, self._channel)
            self._watching = asyncio.get_running_loop().create_task(watching)
        return stream


async def _watch(pulse: Liveness, channel: grpc.aio.Channel) -> None:
    answered = False
    while (step := pulse.next(answered)) is not None:
        answered = step.ask and await answers(channel, step.seconds)
        if not step.ask:
            await asyncio.sleep(step.seconds)
