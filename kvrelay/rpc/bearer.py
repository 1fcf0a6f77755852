"""A channel that sends a bearer token in the metadata of every call.

gRPC's own call credentials need TLS and a thread, its interceptors a task for each call; this costs
a tuple.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self, cast

import grpc

HEADER = "authorization"
SCHEME = "Bearer "
Metadata = tuple[tuple[str, str], ...]


class _Method:
    """A method of a channel, callable in every form that gRPC offers."""

    def __init__(self, method: object, token: Metadata) -> None:
        self._method = method
        self._token = token

    def __call__(self, *args: object, metadata: Metadata | None = None, **more: object) -> object:
        return self._call(self._method, args, metadata, more)

    def future(self, *args: object, metadata: Metadata | None = None, **more: object) -> object:
        return self._call(getattr(self._method, "future"), args, metadata, more)  # noqa: B009

    def with_call(self, *args: object, metadata: Metadata | None = None, **more: object) -> object:
        return self._call(getattr(self._method, "with_call"), args, metadata, more)  # noqa: B009

    def _call(
        self, form: object, args: tuple[object, ...], metadata: Metadata | None, more: object
    ) -> object:
        call = cast("Callable[..., object]", form)
        named = cast("dict[str, object]", more)
        return call(*args, metadata=(*self._token, *(metadata or ())), **named)


class TokenChannel:
    """A sync or asyncio channel that adds the token to every call."""

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
