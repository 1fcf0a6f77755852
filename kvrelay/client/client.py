"""The client library.

    from kvrelay import Client

    with Client("127.0.0.1:50051") as client:
        for piece in client.generate(prompt="Once", max_tokens=32, temperature=0.7):
            print(piece.text, end="")

Errors are those of ``kvrelay.errors``. ``kvrelay.client.aio`` is the same for asyncio.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self, Unpack

import grpc

from kvrelay.client.access import Access, secured
from kvrelay.client.aio import MAX_MESSAGE_BYTES, AsyncClient, AsyncStream
from kvrelay.client.chunk import Chunk, Completion, completion_of
from kvrelay.client.liveness import Liveness
from kvrelay.client.parameters import Parameters, check_open, request_of, seconds_of
from kvrelay.client.stream import BaseStream, Cancellable
from kvrelay.rpc.address import DEFAULT_ROUTER
from kvrelay.rpc.channel import ChannelOptions, open_sync_channel
from kvrelay.rpc.health import responds_sync
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import router_pb2, router_pb2_grpc

__all__ = ["AsyncClient", "AsyncStream", "Chunk", "Client", "Completion", "Stream"]


class _Call(Cancellable, Protocol):
    """What a stream for threads needs of its call."""

    def __next__(self) -> router_pb2.GenerateResponse: ...

    def is_active(self) -> bool: ...


class Stream(BaseStream[_Call], Iterator[Chunk]):
    """An answer under way, for one thread. Closing it, or dropping it, cancels the work."""

    def __next__(self) -> Chunk:
        """Raises a ``KvrelayError`` when the answer cannot be gone on with."""
        if self._closed:
            raise StopIteration
        try:
            message = next(self._call)
        except grpc.RpcError as error:
            if self._closed or self._received.ended:  # by another thread, or a signal handler
                raise StopIteration from None
            raise self._lost or from_rpc_error(error) from error
        return self._take(message)

    @property
    def open(self) -> bool:
        """Whether more may come."""
        return self._lost is None and self._call.is_active()

    def close(self) -> None:
        """Cancel what is under way; without effect on an answer that has ended."""
        self._cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Client:
    """A connection to a router. Threads may share it; close it, or use it in ``with``."""

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
        self._channel = open_sync_channel(address, chosen)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)
        self._pulse = Liveness()
        self._left = threading.Event()

    def generate(self, timeout: float | None = None, **ask: Unpack[Parameters]) -> Stream:
        """Ask; the pieces come as they are made. ``timeout`` in seconds is for the whole answer.

        Raises ``Rejected`` here for arguments that cannot be sent; other errors come while reading.
        """
        return self._start(request_of(ask), timeout)

    def complete(self, timeout: float | None = None, **ask: Unpack[Parameters]) -> Completion:
        """Ask and wait for the whole answer."""
        with self.generate(timeout, **ask) as stream:
            return completion_of(list(stream))

    def resume(self, stream: Stream, timeout: float | None = None) -> Stream:
        """Go on where ``stream`` was broken off: the same tokens follow, none twice.

        Raises ``Rejected`` for one whose answer has ended.
        """
        stream.close()
        return self._start(stream.continued(), timeout)

    def workers(self, timeout: float = 10.0) -> tuple[router_pb2.WorkerStatus, ...]:
        """The workers this router knows."""
        return tuple(self.fleet(timeout).workers)

    def fleet(self, timeout: float = 10.0) -> router_pb2.ListWorkersResponse:
        """The workers and the requests that wait for them."""
        check_open(self._left.is_set())
        try:
            return self._stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def close(self) -> None:
        """Close the connection; streams under way are cancelled."""
        self._left.set()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, request: router_pb2.GenerateRequest, timeout: float | None) -> Stream:
        check_open(self._left.is_set())
        call = self._stub.Generate(request, timeout=seconds_of(timeout))
        stream = Stream(request, call, self._pulse)
        if self._pulse.begin(stream):
            watched = (self._pulse, self._channel, self._left)
            threading.Thread(target=_watch, args=watched, name="pulse", daemon=True).start()
        return stream


def _watch(pulse: Liveness, channel: grpc.Channel, left: threading.Event) -> None:
    answered = False
    while (step := pulse.next(answered)) is not None and not left.is_set():
        with suppress(ValueError):  # of a channel that was closed meanwhile
            answered = step.ask and responds_sync(channel, step.seconds)
        if not step.ask:
            left.wait(step.seconds)
