"""Authenticates each call by its token, and checks that the caller may call the method.

Only headers are read: no message of an unauthenticated call is parsed. A method that is in none of
the tables below is for services and admins. Open calls are bounded, and a call counts from its
headers on, even if no message follows: every tenant, and all unauthenticated callers together, get
a bounded share, so that services always find room.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Never, TypeAlias, TypeVar

import grpc

from kvrelay.errors import Exhausted
from kvrelay.rpc.bearer import HEADER, SCHEME
from kvrelay.rpc.security.credentials import Credentials
from kvrelay.rpc.security.identity import ANONYMOUS, LOCAL_CALLER, Caller, CallerKind, set_caller
from kvrelay.rpc.status import abort, abort_with_code

HEALTH_PREFIX = "/grpc.health.v1.Health/"
"""Methods that need no token: load balancers learn whether the server serves, and no more."""

MAX_WATCHING = 1024  # open calls without a token that are no requests: half of the connections
RETRY_SECONDS = 1.0
SPARE_CALLS = 2  # of a tenant at its limit of requests: they are refused with that reason
MAX_NAME = 200

CLIENTS = frozenset({"/kvrelay.v1.RouterService/Generate"})
OPEN = CLIENTS | {"/kvrelay.v1.RouterService/ListWorkers"}
OPEN_PREFIX = "/grpc.reflection."
"""What callers without a token may call where ``Credentials.open`` says so."""

STORE_USERS = frozenset(
    f"/kvrelay.v1.StoreService/{method}"
    for method in (
        "Lookup",
        "Get",
        "Reserve",
        "Put",
        "PutSmall",
        "Release",
        "GetTransports",
        "Locate",
        "GetStats",
        "Recheck",
    )
)
"""For clients whose tenant has a quota in the store; they reach that tenant's blocks only."""

ADMINS = frozenset(
    {
        "/kvrelay.v1.WorkerService/Drain",
        "/kvrelay.v1.WorkerService/SetRole",
        "/kvrelay.v1.WorkerService/Audit",
        "/kvrelay.v1.StoreService/Clear",
        "/kvrelay.v1.StoreService/List",
        "/kvrelay.v1.StoreService/Inspect",
        "/kvrelay.v1.StoreService/Watch",
    }
)

Q = TypeVar("Q")
R = TypeVar("R")
Handler: TypeAlias = "grpc.RpcMethodHandler[Q, R]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler[Q, R] | None]]"
Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]

refused = Counter[str](unauthenticated=0, forbidden=0)
"""Calls of this process that were refused for their token, by reason; over HTTP too."""


class OpenCalls:
    """Counts the open calls of tenants and of unauthenticated callers, and bounds them.

    A tenant may have ``share`` calls open, and a few more requests than its limit; unauthenticated
    callers ``share`` of each method, and twice that of all methods but requests; where they may
    make requests, these are bounded by ``total`` alone, as all calls together are. A connection
    with an open call is never closed, so calls that cost nothing must not fill a server.
    """

    def __init__(self, credentials: Credentials, share: int, total: int) -> None:
        self._share = share
        self._requests = total if credentials.open else share
        self._total = total
        self._watching = 0  # open calls of unauthenticated callers that are no requests
        self._max_watching = min(2 * share, MAX_WATCHING)
        self._open = Counter[str]()

    def enter(self, found: Caller | None, method: str) -> bool:
        """Count a call until ``leave``. Returns false if there is no room for it."""
        key = _counted_as(found, method)
        watches = found is None and method not in CLIENTS
        if watches and self._watching >= self._max_watching:
            return False
        if self._open[key] >= self._limit(found, method) or self._open.total() >= self._total:
            return False
        self._open[key] += 1
        self._watching += watches
        return True

    def leave(self, found: Caller | None, method: str) -> None:
        """The end of a call that ``enter`` has counted."""
        key = _counted_as(found, method)
        self._watching -= found is None and method not in CLIENTS
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]

    def full(self, found: Caller | None, method: str) -> str:
        """Why ``enter`` has refused a call."""
        return (
            f"{self._open.total()} calls are open, at most {self._limit(found, method)} of this"
            " kind: end some, or ask again"
        )

    def _limit(self, found: Caller | None, method: str) -> int:
        if method not in CLIENTS:
            return self._share
        requests = None if found is None else found.tenant.max_requests
        return self._requests if requests is None else min(self._share, requests + SPARE_CALLS)


def _counted_as(found: Caller | None, method: str) -> str:
    return method if found is None else found.tenant.name


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """The first of a server's interceptors. Calls of services and admins are not counted."""

    def __init__(self, current: Callable[[], Credentials], share: int, total: int) -> None:
        self._current = current
        self._calls = OpenCalls(current(), share, total)

    async def intercept_service(
        self, continuation: Continuation[Q, R], handler_call_details: grpc.HandlerCallDetails
    ) -> Handler[Q, R]:
        """The method's handler, or one that refuses the call.

        Unknown methods are refused here too: when gRPC refuses them for a client that has
        disconnected, it leaks the memory of the status.
        """
        method, known = handler_call_details.method, self._current()
        caller = LOCAL_CALLER
        if known.required:
            found = _identify(known, handler_call_details.invocation_metadata)
            if found is None and not _needs_no_token(known, method):
                refused["unauthenticated"] += 1
                return _refusing(
                    grpc.StatusCode.UNAUTHENTICATED,
                    "no token that this server knows: give --credentials, --endpoints with the"
                    " file of kvrelay up, or set KVRELAY_TOKEN",
                )
            if found is not None and not is_allowed(found, method):
                refused["forbidden"] += 1
                return _refusing(
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"a {found.kind.value} may not call {_name(method)}",
                )
            if not self._count_in(found, method):
                return _refusing(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    self._calls.full(found, method),
                )
            caller = found or ANONYMOUS
        set_caller(caller)
        handler = await continuation(handler_call_details)
        return handler or _refusing(
            grpc.StatusCode.UNIMPLEMENTED, f"no method {_name(method)} on this server"
        )

    def _count_in(self, found: Caller | None, method: str) -> bool:
        """Count the call until its task ends. Returns false if there is no room."""
        if found is not None and found.kind is not CallerKind.CLIENT:
            return True
        task = asyncio.current_task()
        if task is None or not self._calls.enter(found, method):
            return False
        task.add_done_callback(lambda _: self._calls.leave(found, method))
        return True


def _needs_no_token(known: Credentials, method: str) -> bool:
    if method.startswith(HEALTH_PREFIX):
        return True
    return known.open and (method in OPEN or method.startswith(OPEN_PREFIX))


def _identify(known: Credentials, metadata: Metadata) -> Caller | None:
    for key, value in metadata:
        if key == HEADER and isinstance(value, str) and value.startswith(SCHEME):
            return known.identify(value.removeprefix(SCHEME))
    return None


def is_allowed(caller: Caller, method: str) -> bool:
    """Whether a caller may call a method."""
    if method.startswith(HEALTH_PREFIX):
        return True
    if caller.kind is CallerKind.CLIENT:
        stores = caller.tenant.store_bytes is not None
        return method in CLIENTS or (stores and method in STORE_USERS)
    if caller.kind is CallerKind.METRICS:
        return False
    return caller.kind is CallerKind.ADMIN or method not in ADMINS


def _name(method: str) -> str:
    """The method's name, cut to what fits into a status: a caller may send any name."""
    return method if len(method) <= MAX_NAME else f"{method[:MAX_NAME]}..."


def _refusing(code: grpc.StatusCode, message: str) -> Handler[Q, R]:
    """A handler that refuses calls of any shape and reads no message."""

    async def refuse(requests: object, context: grpc.aio.ServicerContext[Q, R]) -> Never:
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            await abort(context, Exhausted(message, RETRY_SECONDS))
        await abort_with_code(context, code, message)

    return grpc.stream_stream_rpc_method_handler(refuse)
