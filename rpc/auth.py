"""The gate of a server: no call goes on before its token was seen and its method allowed.

It looks at a call's headers only, so nobody without a token has a message read. Which caller may
call what stands in one table; what is not in it is for services and admins.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Never, TypeAlias, TypeVar

import grpc

from rpc.credentials import Credentials
from rpc.identity import LOCAL, Identity, Kind, enter

log = logging.getLogger("kvrelay.rpc")
HEADER, SCHEME = "authorization", "Bearer "

OPEN = ("/grpc.health.v1.Health/",)
"""For everybody: load balancers and probes ask this, and learn whether it serves and no more."""

CLIENTS = frozenset({"/kvrelay.v1.Router/Generate"})
STORE_USERS = frozenset(
    f"/kvrelay.v1.KVStore/{method}"
    for method in (
        "Lookup", "Get", "Reserve", "Put", "PutSmall", "Release", "Ways", "Locate", "Stats",
    )
)  # fmt: skip
"""For clients whose tenant has a place in the store; they reach that tenant's blocks only."""

ADMINS = frozenset(
    {
        "/kvrelay.v1.Worker/Drain",
        "/kvrelay.v1.Worker/SetRole",
        "/kvrelay.v1.Worker/Audit",
        "/kvrelay.v1.KVStore/Clear",
        "/kvrelay.v1.KVStore/List",
        "/kvrelay.v1.KVStore/Inspect",
        "/kvrelay.v1.KVStore/Watch",
    }
)

Q = TypeVar("Q")
R = TypeVar("R")
Handler: TypeAlias = "grpc.RpcMethodHandler[Q, R]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler[Q, R] | None]]"
Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]


class Gate(grpc.aio.ServerInterceptor):
    """The first of a server's interceptors."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    async def intercept_service(
        self, continuation: Continuation[Q, R], handler_call_details: grpc.HandlerCallDetails
    ) -> Handler[Q, R] | None:
        """The method's handler, or one that refuses."""
        method = handler_call_details.method
        identity = LOCAL
        if self._credentials.required and not method.startswith(OPEN):
            found = self._identify(handler_call_details.invocation_metadata)
            if found is None:
                return _refusing(
                    grpc.StatusCode.UNAUTHENTICATED,
                    "no token that is known here: give --credentials, or set KVRELAY_TOKEN",
                )
            if not may(found, method):
                return _refusing(
                    grpc.StatusCode.PERMISSION_DENIED, f"a {found.kind.value} may not call {method}"
                )
            identity = found
        enter(identity)
        return await continuation(handler_call_details)

    def _identify(self, metadata: Metadata) -> Identity | None:
        for key, value in metadata:
            if key == HEADER and isinstance(value, str) and value.startswith(SCHEME):
                return self._credentials.identify(value.removeprefix(SCHEME))
        return None


def may(identity: Identity, method: str) -> bool:
    """Whether a caller may call a method."""
    if identity.kind is Kind.CLIENT:
        stores = identity.tenant.store_bytes is not None
        return method in CLIENTS or (stores and method in STORE_USERS)
    return identity.kind is Kind.ADMIN or method not in ADMINS


def _refusing(code: grpc.StatusCode, message: str) -> Handler[Q, R]:
    """Takes calls of any shape and reads none of their messages."""

    async def refuse(requests: object, context: grpc.aio.ServicerContext[Q, R]) -> Never:
        await context.abort(code, message)

    return grpc.stream_stream_rpc_method_handler(refuse)
