"""Sends a bearer token in the metadata of every call of a channel.

gRPC's own call credentials need TLS and a thread, its interceptors a task for each call; this costs
one more Python call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import grpc

HEADER = "authorization"
SCHEME = "Bearer "
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

C = TypeVar("C", grpc.aio.Channel, grpc.Channel)


class _Method(partial[object]):
    """A method of a channel that sends the token besides the metadata of a call."""

    def __call__(
        self, /, *args: object, metadata: Sequence[tuple[str, str]] = (), **more: object
    ) -> object:
        if metadata:
            metadata = (*self.keywords["metadata"], *metadata)
            return super().__call__(*args, metadata=metadata, **more)
        return super().__call__(*args, **more)

    @property
    def future(self) -> Callable[..., object]:
        """The form of a sync channel that does not wait."""
        return partial(getattr(self.func, "future"), **self.keywords)  # noqa: B009


def with_token(channel: C, token: str) -> C:
    """The channel, whose methods send the token from now on."""
    metadata = ((HEADER, SCHEME + token),)

    def sending(make: Callable[..., Callable[..., object]]) -> Callable[..., _Method]:
        return lambda *args, **more: _Method(make(*args, **more), metadata=metadata)

    for kind in KINDS:
        setattr(channel, kind, sending(getattr(channel, kind)))
    return channel
