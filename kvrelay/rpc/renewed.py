"""Channels of a service whose certificates and token may change while it runs.

A call uses those that the process has installed at that moment. With new certificates calls go over
a new connection; calls that are open stay on theirs, which closes behind them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Self, TypeAlias, TypeVar

import grpc

from kvrelay.rpc.bearer import HEADER, SCHEME
from kvrelay.rpc.security.policy import Security, installed

LINGER_SECONDS = 24 * 3600.0  # for open calls on a replaced connection; the longest may be streams

C = TypeVar("C")  # grpc.aio.Channel or grpc.Channel
Method: TypeAlias = Callable[..., object]


class Connections(Generic[C]):
    """The channel of now to one address; ``open`` makes another, ``retire`` ends an old one."""

    def __init__(
        self, address: str, open: Callable[[Security], C], retire: Callable[[C], object]
    ) -> None:
        self._address = address
        self._open = open
        self._retire = retire
        self._security = installed()
        self._lock = threading.Lock()
        self._channel = open(self._security)

    def current(self) -> C:
        """The channel with the certificates of now."""
        now = installed()
        if now is self._security:
            return self._channel
        with self._lock:
            before = self._security
            self._security = now
            if now.tls != before.tls:
                self._retire(self._channel)
                self._channel = self._open(now)
            return self._channel

    def method(
        self, kind: str, args: tuple[object, ...], more: Mapping[str, object]
    ) -> RenewedMethod[C]:
        """A method of the kind "unary_unary", and so on, made with these arguments."""
        return RenewedMethod(self, lambda channel: getattr(channel, kind)(*args, **more))

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The token of now."""
        token = self._security.token_for(self._address)
        return () if token is None else ((HEADER, SCHEME + token),)


class RenewedMethod(Generic[C]):
    """A method of the current channel."""

    def __init__(self, connections: Connections[C], make: Callable[[C], Method]) -> None:
        self._connections = connections
        self._make = make
        self._channel = connections.current()
        self._method = make(self._channel)

    def __call__(
        self, *args: object, metadata: Sequence[tuple[str, str]] = (), **more: object
    ) -> object:
        method = self._of_now()  # first: it may renew the token
        return method(*args, metadata=(*self._connections.metadata(), *metadata), **more)

    def future(self, *args: object, **more: object) -> object:
        """The form of a sync channel that does not wait."""
        method: Method = getattr(self._of_now(), "future")  # noqa: B009
        return method(*args, metadata=self._connections.metadata(), **more)

    def _of_now(self) -> Method:
        channel = self._connections.current()
        if channel is not self._channel:
            self._channel = channel
            self._method = self._make(channel)
        return self._method


class RenewedChannel(grpc.aio.Channel):
    """For asyncio."""

    def __init__(self, address: str, open: Callable[[Security], grpc.aio.Channel]) -> None:
        self._closing = set[asyncio.Future[None]]()
        self._connections = Connections(address, open, self._retire)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for task in self._closing:
            task.cancel()  # the channel behind it is closed when nothing refers to it
        await self._connections.current().close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._connections.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._connections.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._connections.current().channel_ready()

    def unary_unary(self, *args: object, **more: object) -> RenewedMethod[grpc.aio.Channel]:  # type: ignore[override]
        return self._connections.method("unary_unary", args, more)

    def unary_stream(self, *args: object, **more: object) -> RenewedMethod[grpc.aio.Channel]:  # type: ignore[override]
        return self._connections.method("unary_stream", args, more)

    def stream_unary(self, *args: object, **more: object) -> RenewedMethod[grpc.aio.Channel]:  # type: ignore[override]
        return self._connections.method("stream_unary", args, more)

    def stream_stream(self, *args: object, **more: object) -> RenewedMethod[grpc.aio.Channel]:  # type: ignore[override]
        return self._connections.method("stream_stream", args, more)

    def _retire(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.ensure_future(channel.close(LINGER_SECONDS))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class RenewedSyncChannel(grpc.Channel):
    """For code without an event loop. A replaced connection closes once nothing refers to it."""

    def __init__(self, address: str, open: Callable[[Security], grpc.Channel]) -> None:
        self._connections = Connections(address, open, lambda channel: None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._connections.current().close()

    def subscribe(
        self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool = False
    ) -> None:
        self._connections.current().subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        self._connections.current().unsubscribe(callback)

    def unary_unary(self, *args: object, **more: object) -> RenewedMethod[grpc.Channel]:  # type: ignore[override]
        return self._connections.method("unary_unary", args, more)

    def unary_stream(self, *args: object, **more: object) -> RenewedMethod[grpc.Channel]:  # type: ignore[override]
        return self._connections.method("unary_stream", args, more)

    def stream_unary(self, *args: object, **more: object) -> RenewedMethod[grpc.Channel]:  # type: ignore[override]
        return self._connections.method("stream_unary", args, more)

    def stream_stream(self, *args: object, **more: object) -> RenewedMethod[grpc.Channel]:  # type: ignore[override]
        return self._connections.method("stream_stream", args, more)
