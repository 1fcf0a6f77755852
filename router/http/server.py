"""Life cycle of the HTTP server: bind, serve on this event loop, stop.

uvicorn with httptools: of the servers measured it takes the least processor time for an event of a
stream. ``benchmarks/door`` compares this door with the gRPC one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import socket
import ssl
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from kvrelay.errors import Rejected
from kvrelay.rpc.address import Address
from kvrelay.rpc.reserved import is_reserved
from kvrelay.rpc.security.policy import Security, installed
from kvrelay.rpc.security.tls import server_context
from router.http.connection.protocol import BoundedProtocol
from router.http.connection.table import ConnectionTable, HttpLimits
from router.http.connection.tls import TlsConnection

BACKLOG = 1024
POLL_SECONDS = 0.05
END_SECONDS = 0.3  # for the last events of requests that are cut off


class _EmbeddedServer(uvicorn.Server):
    """Leaves the process's signals alone and says when it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()

    def cancel_requests(self) -> None:
        """Each tells its client that the router ends."""
        for one in self.open:
            one.end_with_the_oldest()
        for task in self.server_state.tasks:
            task.cancel()

    def abort_connections(self) -> None:
        """Abort open connections: their clients do not read the response, or still send."""
        for one in self.open:
            one.abort()

    @property
    def open(self) -> list[BoundedProtocol]:
        """The open connections that speak HTTP."""
        known = self.server_state.connections
        return [one for one in known if isinstance(one, BoundedProtocol)]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """One server; ``start`` it, and ``stop`` it once."""

    def __init__(self, app: ASGIApp, address: Address, limits: HttpLimits) -> None:
        self._app = app
        self._address = address
        self.connections = ConnectionTable(_within_open_files(limits))
        self._server: _EmbeddedServer | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, security: Security | None = None) -> str:
        """Bind and serve; returns the base URL, without a path.

        Raises ``Rejected`` if the port is taken, or needs protection that is missing. Without
        ``security`` it has what this process has installed, at each moment.
        """
        current = installed if security is None else lambda: security
        current().check_listen(self._address)
        encrypted = current().tls is not None
        context = server_context(lambda: current().used_tls) if encrypted else None
        listening = _bind(self._address)
        bound = self._address.with_port(listening.getsockname()[1])
        protocol = type("_Protocol", (BoundedProtocol,), {"table": self.connections})
        config = uvicorn.Config(
            self._app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.ERROR,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=math.ceil(self.connections.limits.idle_seconds),
            backlog=BACKLOG,
        )
        config.load()
        if context is not None:
            config.http_protocol_class = _over_tls(protocol, context)
        self._server = _EmbeddedServer(config)
        self._task = asyncio.create_task(self._server.serve([listening]), name="http")
        await self._server.accepting.wait()
        return f"{'http' if context is None else 'https'}://{bound}"

    async def drained(self) -> None:
        """Wait until every answer that is being made now is with its client."""
        left = [] if self._server is None else self._server.open
        while left := [one for one in left if one.answers or one.writes]:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)

    async def stop(self, grace: float = 0.0) -> None:
        """Accept no more connections, give open requests ``grace`` seconds, at least 1, close."""
        server = self._server
        self._server = None
        if server is None or self._task is None:
            return
        seconds = max(1, math.ceil(grace))
        server.config.timeout_graceful_shutdown = seconds + 1
        server.should_exit = True
        self.connections.abort_handshakes()
        loop = asyncio.get_running_loop()
        cancelling = loop.call_later(seconds, server.cancel_requests)
        aborting = loop.call_later(seconds + END_SECONDS, server.abort_connections)
        try:
            await self._task
        finally:
            cancelling.cancel()
            aborting.cancel()


def _over_tls(protocol: type[BoundedProtocol], context: ssl.SSLContext) -> type[asyncio.Protocol]:
    """What uvicorn calls for a new connection as if it were the class of its protocol."""

    def make(**given: object) -> TlsConnection:
        return TlsConnection(protocol(**given), context)  # type: ignore[arg-type]

    return cast("type[asyncio.Protocol]", make)


def _bind(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # Named, since asyncio turns Nagle's algorithm off only for sockets that say their protocol.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setblocking(False)
    try:
        if is_reserved(address):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind((address.host, address.port or 0))
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise Rejected(
            "http_port",
            f"cannot listen on {address} ({error.strerror}): stop the process that does, or choose"
            " another --http-port (0 takes any free one)",
        ) from None
    return made


def _within_open_files(limits: HttpLimits) -> HttpLimits:
    """A quarter of the files that the process may open: gRPC's connections may have half."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    places = limits.connections if files < 0 else min(limits.connections, files // 4)
    per_host = min(limits.connections_per_host, max(places // 2, 1))
    return replace(limits, connections=places, connections_per_host=per_host)
