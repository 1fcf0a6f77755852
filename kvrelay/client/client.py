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
from types import TracebackType
from typing import Protocol, Self

import grpc

from kvrelay.client.chunk import Chunk, Completion, completion_of
from kvrelay.client.connection import channel_options, check_address, check_open
from kvrelay.client.liveness import Liveness, responds_sync
from kvrelay.client.parameters import Parameters, seconds_of, takes_parameters
from kvrelay.client.stream import BaseStream, Cancellable
from kvrelay.rpc.address import DEFAULT_ROUTER
from kvrelay.rpc.channel import ChannelOptions, open_sync_channel
from kvrelay.rpc.security.options import SecurityOptions
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
            raise self._lost or from_rpc_error(error) from error
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
    """A connection to a router. Threads may share it. Close it, or use it in ``with``."""

    def __init__(
        self,
        address: str = DEFAULT_ROUTER,
        options: ChannelOptions | None = None,
        *,
        token: str | None = None,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        tls_name: str | None = None,
        allow_insecure: bool = False,
    ) -> None:
        """Connects with the first request.

        token: the bearer token that this client sends. Without TLS it is sent to this machine
            only, unless ``allow_insecure``.
        tls_ca, tls_cert, tls_key: paths of PEM files: the authority to trust, this client's own
            certificate and its key. tls_name: the name in the router's certificate if it is not its
            address.
        """
        access = SecurityOptions(
            token=token,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_name=tls_name,
            allow_insecure=allow_insecure,
        )
        self._channel = open_sync_channel(check_address(address), channel_options(options, access))
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)
        self._liveness = Liveness()
        self._closed = threading.Event()

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
        stream.close()
        return self._start(stream.continued(), timeout)

    def workers(self, timeout: float = 10.0) -> tuple[router_pb2.WorkerStatus, ...]:
        """The workers that this router knows."""
        return tuple(self.fleet(timeout).workers)

    def fleet(self, timeout: float = 10.0) -> router_pb2.ListWorkersResponse:
        """The workers that this router knows, and its queue."""
        check_open(self._closed.is_set())
        try:
            return self._stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def close(self) -> None:
        """Close the connection; open streams are cancelled."""
        self._closed.set()
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
        check_open(self._closed.is_set())
        call = self._stub.Generate(request, timeout=seconds_of(timeout))
        stream = Stream(request, call, self._liveness)
        if self._liveness.begin(stream):
            watched = (self._liveness, self._channel, self._closed)
            threading.Thread(target=_watch, args=watched, name="liveness", daemon=True).start()
        return stream


def _watch(liveness: Liveness, channel: grpc.Channel, closed: threading.Event) -> None:
    answered = False
    while (step := liveness.next(answered)) is not None and not closed.is_set():
        with suppress(ValueError):  # the channel was closed meanwhile
            answered = step.probe and responds_sync(channel, step.seconds)
        if not step.probe:
            closed.wait(step.seconds)
