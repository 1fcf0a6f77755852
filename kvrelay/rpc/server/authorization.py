"""The gate of a server: no call goes on before its token was seen and its method allowed.

It looks at a call's headers only, so nobody without a token has a message read. Which caller may
call what stands in one table; what is not in it is for services and admins. A server's places for
calls are bounded, and a call takes one as soon as its headers are there, though a message may never
follow: so strangers and each tenant get a part of them, and services always find one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Never, TypeAlias, TypeVar

import grpc

from kvrelay.errors import Exhausted
from kvrelay.rpc.security.credentials import Credentials
from kvrelay.rpc.security.identity import ANONYMOUS, LOCAL, Caller, CallerKind, enter
from kvrelay.rpc.status import abort, end

log = logging.getLogger("kvrelay.rpc")
HEADER, SCHEME = "authorization", "Bearer "

OPEN = "/grpc.health.v1.Health/"
"""For everybody: load balancers and probes ask this, and learn whether it serves and no more."""

RETRY_SECONDS = 1.0
LONGEST_NAME = 200

CLIENTS = frozenset({"/kvrelay.v1.RouterService/Generate"})
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
"""For clients whose tenant has a place in the store; they reach that tenant's blocks only."""

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


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """The first of a server's interceptors. ``places``: calls that one who is no service may have
    open at once, and ``together`` all of these; what strangers may ask has as many for each
    method."""

    def __init__(self, credentials: Credentials, places: int, together: int) -> None:
        self._credentials = credentials
        self._places = places
        self._together = together
        self._open = Counter[str]()

    async def intercept_service(
        self, continuation: Continuation[Q, R], handler_call_details: grpc.HandlerCallDetails
    ) -> Handler[Q, R]:
        """The method's handler, or one that refuses.

        Whoever asks for a method that there is not is refused here too: gRPC does it at once, and
        loses for good what it allocated for the status where the client has left.
        """
        method = handler_call_details.method
        identity = LOCAL
        if self._credentials.required:
            found = self._identify(handler_call_details.invocation_metadata)
            if found is None and not method.startswith(OPEN):
                return _refusing(
                    grpc.StatusCode.UNAUTHENTICATED,
                    "no token that is known here: give --credentials, or set KVRELAY_TOKEN",
                )
            if found is not None and not may(found, method):
                return _refusing(
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"a {found.kind.value} may not call {_name(method)}",
                )
            if not self._take_place(found, method):
                return _refusing(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"{self._open.total()} calls are open, {self._places} at most of this kind: end"
                    " some, or ask again",
                )
            identity = found or ANONYMOUS
        enter(identity)
        handler = await continuation(handler_call_details)
        return handler or _refusing(grpc.StatusCode.UNIMPLEMENTED, f"no {_name(method)} is here")

    def _take_place(self, found: Caller | None, method: str) -> bool:
        """Until the call's task ends, which it does however the call ends."""
        if found is not None and found.kind is not CallerKind.CLIENT:
            return True
        who = method if found is None else found.tenant.name
        task = asyncio.current_task()
        full = self._open[who] >= self._places or self._open.total() >= self._together
        if full or task is None:
            return False
        self._open[who] += 1
        task.add_done_callback(lambda _: self._leave(who))
        return True

    def _leave(self, who: str) -> None:
        self._open[who] -= 1
        if not self._open[who]:
            del self._open[who]

    def _identify(self, metadata: Metadata) -> Caller | None:
        for key, value in metadata:
            if key == HEADER and isinstance(value, str) and value.startswith(SCHEME):
                return self._credentials.identify(value.removeprefix(SCHEME))
        return None


def may(identity: Caller, method: str) -> bool:
    """Whether a caller may call a method."""
    if method.startswith(OPEN):
        return True
    if identity.kind is CallerKind.CLIENT:
        stores = identity.tenant.store_bytes is not None
        return method in CLIENTS or (stores and method in STORE_USERS)
    return identity.kind is CallerKind.ADMIN or method not in ADMINS


def _name(method: str) -> str:
    """As much of it as goes into a status: a caller may call it what he likes."""
    return method if len(method) <= LONGEST_NAME else f"{method[:LONGEST_NAME]}..."


def _refusing(code: grpc.StatusCode, message: str) -> Handler[Q, R]:
    """Takes calls of any shape and reads none of their messages."""

    async def refuse(requests: object, context: grpc.aio.ServicerContext[Q, R]) -> Never:
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            await abort(context, Exhausted(message, RETRY_SECONDS))
        await end(context, code, message)

    return grpc.stream_stream_rpc_method_handler(refuse)
