"""Wraps every handler: errors, and requests that do not parse, become gRPC status.

This is the process's edge for a call: an exception that is not a ``KvrelayError`` ends the call as
INTERNAL, with the traceback in the log and nothing of it on the wire.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Never, Self, TypeAlias, TypeVar, cast

import grpc

from kvrelay.errors import KvrelayError, Rejected, Unavailable
from kvrelay.rpc.server.connections import ConnectionGuard
from kvrelay.rpc.server.parsing import tolerant_parser
from kvrelay.rpc.status import abort

log = logging.getLogger("kvrelay.rpc")

Q = TypeVar("Q")
R = TypeVar("R")
S = TypeVar("S")
# Quoted: these classes are generic in the type stubs only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Q, R]"
Context: TypeAlias = "grpc.aio.ServicerContext[Q, R]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler[Q, R] | None]]"
Read: TypeAlias = Callable[[], Awaitable[Q]]
READS_LATE = "kvrelay_reads_late"


def reads_late(
    handler: Callable[[S, Read[Q], Context[Q, R]], AsyncGenerator[R]],
) -> Callable[[S, Q, Context[Q, R]], AsyncGenerator[R]]:
    """Mark a handler of one request that reads it itself, when there is memory for it.

    It gets a function that reads the request. Before that call the request stays with the client,
    but for what fits into the stream's HTTP/2 window, and gRPC keeps no reference to it afterwards.
    """
    setattr(handler, READS_LATE, True)
    return cast("Callable[[S, Q, Context[Q, R]], AsyncGenerator[R]]", handler)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler, once.

    A stream that its client does not read for ``stuck`` seconds ends. Such a client may still
    answer pings, and would hold the stream's resources until the deadline.
    """

    def __init__(self, stuck: float, guard: ConnectionGuard) -> None:
        self._stuck = stuck
        self._guard = guard
        self._wrapped: dict[str, tuple[object, object]] = {}

    async def intercept_service(
        self, continuation: Continuation[Q, R], handler_call_details: grpc.HandlerCallDetails
    ) -> Handler[Q, R] | None:
        """The wrapped handler of the method, ``None`` if there is no such method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:
            known = self._wrapped[method] = handler, self._wrap(method, handler)
        return cast("Handler[Q, R]", known[1])

    def _wrap(self, method: str, handler: Handler[Q, R]) -> Handler[Q, R]:
        kinds = {
            (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
            (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
        }
        make, behaviour = kinds[handler.request_streaming, handler.response_streaming]
        late = getattr(behaviour, READS_LATE, False)
        if late:  # on the wire a stream of requests begins as a single request does
            make, _ = kinds[True, handler.response_streaming]
        if inspect.isasyncgenfunction(behaviour):
            inner = _writing(behaviour, self._stuck)
        elif inspect.iscoroutinefunction(behaviour):
            inner = behaviour
        else:
            raise TypeError(f"{method}: handlers are coroutine functions or async generators")
        parse = handler.request_deserializer
        wrapped = make(
            _edge(method, inner, self._guard, streaming=handler.request_streaming, late=late),
            request_deserializer=None if parse is None else tolerant_parser(parse),
            response_serializer=handler.response_serializer,
        )
        return cast("Handler[Q, R]", wrapped)


def _writing(
    behaviour: Callable[[Q, Context[Q, R]], AsyncGenerator[R, None]], stuck: float
) -> Callable[[Q, Context[Q, R]], Awaitable[None]]:
    """The generator as a coroutine that writes, so a disconnect closes it at once."""

    async def write_all(request: Q, context: Context[Q, R]) -> None:
        try:
            async with asyncio.timeout(None) as limit:
                with _WriteWatch(limit, stuck) as watch:
                    async with aclosing(behaviour(request, context)) as responses:
                        async for response in responses:
                            watch.begin()
                            await context.write(response)
                            watch.end()
        except TimeoutError:
            if not limit.expired():
                raise
            why = f"the client read nothing of it for {stuck:g} s: resume it or retry"
            raise Unavailable(f"stream: {why}") from None

    return write_all


class _WriteWatch:
    """Lets ``limit`` expire once a write has taken ``seconds``.

    It has one timer a stream. A timeout for each message took a tenth of the router's time.
    """

    def __init__(self, limit: asyncio.Timeout, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._seconds, self._look)
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def begin(self) -> None:
        self._since = self._loop.time()

    def end(self) -> None:
        self._since = None

    def _look(self) -> None:
        now = self._loop.time()
        since = now if self._since is None else self._since
        if now < since + self._seconds:
            self._timer = self._loop.call_at(since + self._seconds, self._look)
        else:
            self._limit.reschedule(now)


def _edge(
    method: str,
    inner: Callable[..., Awaitable[object]],
    guard: ConnectionGuard,
    *,
    streaming: bool,
    late: bool,
) -> Callable[..., Awaitable[object]]:
    async def call(request: object, context: Context[Q, R]) -> object:
        try:
            with guard.counted(context.peer()):
                if late:
                    return await inner(partial(_read, context), context)
                if not streaming:
                    return await inner(_checked(request), context)
                async with aclosing(_checked_all(context)) as requests:
                    return await inner(requests, context)
        except KvrelayError as error:
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except grpc.aio.InternalError as error:
            # The client disconnected; gRPC reports that only on a write or a read.
            log.debug("%s: %r", method, error)
            raise asyncio.CancelledError from error
        except Exception as error:  # noqa: BLE001 - the edge: it ends this call
            await _abort_unknown(method, context, error)

    return call


def _checked(request: object) -> object:
    if isinstance(request, Rejected):
        raise request
    return request


async def _read(context: Context[Q, R]) -> object:
    request = await context.read()
    if request is grpc.aio.EOF:
        raise Rejected("request", "the call ended without one")
    return _checked(request)


async def _checked_all(context: Context[Q, R]) -> AsyncGenerator[object]:
    # Not gRPC's own iterator: it is a reference cycle until it is read to its end.
    while (request := await context.read()) is not grpc.aio.EOF:
        yield _checked(request)


async def _abort_unknown(method: str, context: Context[Q, R], error: Exception) -> Never:
    if context.cancelled() or context.done():
        log.debug("%s: %r after the client disconnected", method, error)
        raise error
    log.error("%s failed", method, exc_info=error)
    await abort(context, KvrelayError("internal error, see the server's log"))
