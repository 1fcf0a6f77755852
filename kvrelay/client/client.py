"""The client library for threads.

    from kvrelay import Client

    with Client("127.0.0.1:50051") as client:
        for chunk in client.generate(prompt="Once", max_tokens=32, temperature=0.7):
            print(chunk.text, end="")

Errors are those of ``kvrelay.errors``. ``kvrelay.AsyncClient`` has the same methods for asyncio.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol, Self

import grpc

from kvrelay.client.chunk import Chunk, Completion, completion_of
from kvrelay.client.connection import BaseClient
from kvrelay.client.convert import fleet_of
from kvrelay.client.liveness import Liveness, responds_sync
from kvrelay.client.parameters import Parameters, seconds_of, takes_parameters
from kvrelay.client.stream import BaseStream, Cancellable
from kvrelay.fleet import FleetStatus, WorkerStatus
from kvrelay.rpc.channel import ChannelOptions, open_sync_channel
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import router_pb2, router_pb2_grpc


class _Call(Cancellable, Protocol):
    """The gRPC call of a stream for threads."""

    def __next__(self) -> router_pb2.GenerateResponse: ...

    def is_active(self) -> bool: ...


class Stream(BaseStream[_Call], Iterator[Chunk]):
    """A streamed answer, for one thread. Closing or dropping the stream cancels the request."""

    def __next__(self) -> Chunk:
        """Raises ``KvrelayError`` if the stream cannot continue."""
        if self._cancelled:
            raise StopIteration
        try:
            message = next(self._call)
        except grpc.RpcError as error:
            # Another thread or a signal handler cancelled the stream, or the answer is complete.
            if self._cancelled or self._received.ended:
                raise StopIteration from None
            raise self._failure(error) from error
        return self._take(message)

    @property
    def open(self) -> bool:
        """Whether more chunks may follow."""
        return self._lost is None and self._call.is_active()

    def close(self) -> None:
        """Cancel the request."""
        self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Client(BaseClient):
    """A connection to a router. Threads may share it. Close it, or use it in ``with``."""

    def _connect(self, address: str, options: ChannelOptions) -> None:
        self._channel = open_sync_channel(address, options)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)

    @takes_parameters(Parameters)
    def generate(self, parameters: Parameters) -> Stream:
        """Generates an answer and streams its chunks as they are made.

        Raises ``Rejected`` at once for invalid parameters; reading the stream raises other errors.
        """
        return self._start(parameters.message(), parameters.timeout)

    @takes_parameters(Parameters)
    def complete(self, parameters: Parameters) -> Completion:
        """Generates an answer and waits until it is complete."""
        with self._start(parameters.message(), parameters.timeout) as stream:
            return completion_of(list(stream))

    def resume(self, stream: Stream, timeout: float | None = None) -> Stream:
        """Continues a broken stream after its last token; no token is repeated.

        The stream may belong to another client. Raises ``Rejected`` if its answer has ended.
        """
        return self._start(self._continued(stream), timeout)

    def workers(self, timeout: float | None = 10.0) -> tuple[WorkerStatus, ...]:
        """The workers that this router knows."""
        return self.fleet(timeout).workers

    def fleet(self, timeout: float | None = 10.0) -> FleetStatus:
        """The workers that this router knows, and its queue."""
        self._check_open()
        request, limit = router_pb2.ListWorkersRequest(), seconds_of(timeout)
        try:
            return fleet_of(self._stub.ListWorkers(request, timeout=limit))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def close(self) -> None:
        """Close the connection; open streams are cancelled."""
        self._closed.set()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, request: router_pb2.GenerateRequest, timeout: float | None) -> Stream:
        self._check_request(request)
        call = self._stub.Generate(request, timeout=seconds_of(timeout))
        stream = Stream(request, call, self._liveness)
        if self._liveness.begin(stream):
            watched = (self._liveness, self._channel, self._closed)
            threading.Thread(target=_watch, args=watched, name="liveness", daemon=True).start()
        return stream


def _watch(liveness: Liveness, channel: grpc.Channel, closed: threading.Event) -> None:
    answered = False
    while (step := liveness.next(answered)) is not None and not closed.is_set():
        with suppress(ValueError):  # the channel has been closed since
            answered = step.probe and responds_sync(channel, step.seconds)
        if not step.probe:
            closed.wait(step.seconds)
