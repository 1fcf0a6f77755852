"""A channel that shows a token with every call, in its metadata.

gRPC's own call credentials want TLS and a thread; its interceptors want a task for each call. This
costs a tuple.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self, cast

import grpc

from kvrelay.rpc.server.authorization import HEADER, SCHEME

Metadata = tuple[tuple[str, str], ...]


class _Method:
    """A method of a channel; called in any of the ways gRPC knows."""

    def __init__(self, method: object, token: Metadata) -> None:
        self._method = method
        self._token = token

    def __call__(self, *args: object, metadata: Metadata | None = None, **more: object) -> object:
        return self._go(self._method, args, metadata, more)

    def future(self, *args: object, metadata: Metadata | None = None, **more: object) -> object:
        return self._go(getattr(self._method, "future"), args, metadata, more)  # noqa: B009

    def with_call(self, *args: object, metadata: Metadata | None = None, **more: object) -> object:
        return self._go(getattr(self._method, "with_call"), args, metadata, more)  # noqa: B009

    def _go(
        self, way: object, args: tuple[object, ...], metadata: Metadata | None, more: object
    ) -> object:
        known = cast("Callable[..., object]", way)
        named = cast("dict[str, object]", more)
        return known(*args, metadata=(*self._token, *(metadata or ())), **named)


class TokenChannel:
    """A channel of either kind, and with every call the token."""

    def __init__(self, channel: grpc.aio.Channel | grpc.Channel, token: str) -> None:
        self._channel = channel
        self._token: Metadata = ((HEADER, SCHEME + token),)

    def unary_unary(self, *args: object, **more: object) -> _Method:
        return self._method("unary_unary", args, more)

    def unary_stream(self, *args: object, **more: object) -> _Method:
        return self._method("unary_stream", args, more)

    def stream_unary(self, *args: object, **more: object) -> _Method:
        return self._method("stream_unary", args, more)

    def stream_stream(self, *args: object, **more: object) -> _Method:
        return self._method("stream_stream", args, more)

    def _method(self, kind: str, args: tuple[object, ...], more: dict[str, object]) -> _Method:
        return _Method(getattr(self._channel, kind)(*args, **more), self._token)

    def __getattr__(self, name: str) -> object:
        return getattr(self._channel, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        cast("grpc.Channel", self._channel).close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await cast("grpc.aio.Channel", self._channel).close()
