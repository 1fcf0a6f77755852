"""Spans of the store's part of a leg: its gRPC calls, with the blocks asked for and found.

A call without a ``traceparent`` begins no trace. What a client does over shared memory or the
socket transport is in its own spans alone (``kvstore.client.traced``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeAlias, TypeVar

from kvrelay.rpc import tracing
from kvrelay.rpc.tracing import Attributes
from kvrelay.v1 import store_pb2 as pb
from kvstore.wire.buffers import HEAD, parse
from kvstore.wire.messages import miss_of

Q = TypeVar("Q")
R = TypeVar("R")
Unary: TypeAlias = Callable[[Q, tracing.Call], Awaitable[R]]
Streaming: TypeAlias = Callable[[pb.GetRequest, tracing.Call], AsyncGenerator[bytes, None]]


def traced(name: str, handler: Unary[Q, R]) -> Unary[Q, R]:
    """The handler of a call with one answer, in a span if the caller is traced."""
    if not tracing.installed():
        return handler

    async def serve(request: Q, context: tracing.Call) -> R:
        with tracing.joining(name, context) as span, tracing.under(span):
            response = await handler(request, context)
            if span.on:
                span.set({**_asked(request), **_answered(response)})
            return response

    return serve


def traced_get(handler: Streaming) -> Streaming:
    """The handler of ``Get``; its span ends with the last message, or when the reader leaves."""
    if not tracing.installed():
        return handler

    async def serve(request: pb.GetRequest, context: tracing.Call) -> AsyncGenerator[bytes, None]:
        sent, total = 0, 0
        with tracing.joining("Get", context) as span, tracing.under(span):
            try:
                async with aclosing(handler(request, context)) as messages:
                    async for message in messages:
                        part, body = parse(message)
                        if part == HEAD:
                            total = sum(pb.GetHead.FromString(bytes(body)).lengths)
                        else:
                            sent += len(body)
                        if sent == total:
                            span.complete()
                        yield message
            finally:
                span.set({**_asked(request), "kvrelay.store.bytes": sent})

    return serve


def _asked(request: object) -> Attributes:
    """Blocks that the request names; those of ``Put`` are in its verdicts."""
    match request:
        case pb.LookupRequest():
            return {"kvrelay.blocks.asked": len(request.names) + len(request.tails)}
        case pb.GetRequest() | pb.LocateRequest():
            return {"kvrelay.blocks.asked": len(request.names)}
    return {}


def _answered(response: object) -> Attributes:
    match response:
        case pb.LookupResponse():
            missing = miss_of(response.first_miss)
            reason = {} if missing is None else {"kvrelay.missed.reason": missing.value}
            return {**_found(response.lengths), **reason}
        case pb.LocateResponse():
            return _found(response.lengths)
        case pb.ReserveResponse() | pb.PutResponse() | pb.PutSmallResponse():
            return _verdicts(response.verdicts)
    return {}


def _found(lengths: Sequence[int]) -> Attributes:
    present = [length for length in lengths if length]
    return {"kvrelay.blocks.found": len(present), "kvrelay.store.bytes": sum(present)}


def _verdicts(verdicts: Sequence[pb.Verdict.ValueType]) -> Attributes:
    """How many blocks got each verdict."""
    counts = Counter(pb.Verdict.Name(verdict) for verdict in verdicts)
    return {
        f"kvrelay.blocks.{name.removeprefix('VERDICT_').lower()}": count
        for name, count in counts.items()
    }
