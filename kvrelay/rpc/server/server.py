"""Life cycle of a gRPC server: bind, serve with health and reflection, stop.

    server = Server(ServerOptions("127.0.0.1:0"))
    server.add(SERVICE, lambda s: add_DecodeServiceServicer_to_server(servicer, s))
    address = await server.start()            # "127.0.0.1:41234"
    await serve_until_signal(server, ready=lambda address: f"decode worker ready at {address}")

Every handler runs inside ``errors.ErrorInterceptor``: raise a ``KvrelayError`` and the status is
right. ``serve_until_signal`` is in ``kvrelay.rpc.server.run``.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvrelay.errors import Rejected
from kvrelay.rpc import keepalive
from kvrelay.rpc.address import Address
from kvrelay.rpc.reserved import is_reserved
from kvrelay.rpc.security.policy import Security, installed
from kvrelay.rpc.security.tls import server_credentials
from kvrelay.rpc.server.authorization import AuthInterceptor
from kvrelay.rpc.server.connections import ConnectionGuard, ConnectionLimits
from kvrelay.rpc.server.errors import ErrorInterceptor
from kvrelay.rpc.server.workarounds import quiet_grpc_log, tolerate_bad_method_names

MIB = 1 << 20
MAX_CALLS = 4096
CALL_SHARES = 8
"""A tenant may have one share of a server's calls open, and unauthenticated callers one."""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """``security`` defaults to what this process has installed."""

    address: str = "127.0.0.1:0"
    max_message_bytes: int = 8 * MIB
    max_connections: int = 2048  # each may hold some hundred KiB of unparsed input
    max_connections_per_host: int = 1024
    first_call_seconds: float = 20.0  # for the first call of a connection
    idle_seconds: float = 300.0  # a connection without an open call ends after that
    max_concurrent_streams: int = 1024  # per connection
    max_calls: int = MAX_CALLS  # over all connections; further calls get RESOURCE_EXHAUSTED
    handshake_seconds: float = 20.0  # for a new connection to begin HTTP/2
    keepalive_seconds: float = 15.0
    keepalive_timeout_seconds: float = 15.0
    ping_seconds: float = keepalive.PING_SECONDS
    stuck_seconds: float = 120.0  # a stream that the client does not read ends after that
    # Lets a stream's window grow with the bandwidth: then megabytes of each call arrive before its
    # handler reads any, and no handler can bound them.
    probe_bandwidth: bool = True
    security: Security | None = None

    @property
    def connection_limits(self) -> ConnectionLimits:
        """Bounds of ``ConnectionGuard``: it makes room at 7/8 of all connections or files."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        places = self.max_connections if files < 0 else min(self.max_connections, files // 2)
        return ConnectionLimits(
            per_host=min(self.max_connections_per_host, places // 2),
            crowded=places - places // 8,
            first_call_seconds=self.first_call_seconds,
        )

    def arguments(self, reserved: bool = False) -> list[tuple[str, int]]:
        """Channel arguments of gRPC core, for a port that is ``reserved`` for this process."""
        return [
            ("grpc.so_reuseport", int(reserved)),  # else a taken port would be shared, no error
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_connection_idle_ms", round(self.idle_seconds * 1000)),
            ("grpc.max_concurrent_streams", self.max_concurrent_streams),
            ("grpc.server_handshake_timeout_ms", round(self.handshake_seconds * 1000)),
            *keepalive.arguments(
                self.keepalive_seconds, self.keepalive_timeout_seconds, self.ping_seconds
            ),
            ("grpc.http2.bdp_probe", self.probe_bandwidth),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
        ]


class HealthService:
    """What a server reports of itself; the service ``""`` stands for the whole server."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()

    def register(self, server: grpc.aio.Server) -> None:
        """Add the health service to a server that has not been started."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set(self, service: str, serving: bool) -> None:
        """Report SERVING or NOT_SERVING for ``service``."""
        await self._servicer.set(service, _SERVING if serving else _NOT_SERVING)

    async def leave(self) -> None:
        """Report NOT_SERVING for everything, for good."""
        await self._servicer.enter_graceful_shutdown()


class Server:
    """One ``grpc.aio`` server. ``add`` services, then ``start``; ``stop`` may be called twice."""

    def __init__(self, options: ServerOptions | None = None) -> None:
        self.options = options or ServerOptions()
        self.health = HealthService()
        self._guard = ConnectionGuard(self.options.connection_limits)
        self._services: dict[str, tuple[Callable[[grpc.aio.Server], None], bool]] = {}
        self._server: grpc.aio.Server | None = None

    def add(
        self, service: str, register: Callable[[grpc.aio.Server], None], serving: bool = True
    ) -> None:
        """Serve ``service`` (such as ``kvrelay.v1.DecodeService``) with this health."""
        self._services[service] = register, serving

    async def start(self) -> str:
        """Bind and serve; returns the address with the bound port.

        Raises ``Rejected`` if the address cannot be bound, or needs protection that is missing.
        """
        address = Address.parse(self.options.address)
        current = self._security
        security = current()
        security.check_listen(address)
        share = max(self.options.max_calls // CALL_SHARES, 1)
        unreserved = max(self.options.max_calls - share, 1)
        authorize = AuthInterceptor(lambda: current().credentials, share, unreserved)
        quiet_grpc_log()
        tolerate_bad_method_names()
        with _binding(address):
            reserved = is_reserved(address)
        server = grpc.aio.server(
            interceptors=(authorize, ErrorInterceptor(self.options.stuck_seconds, self._guard)),
            options=self.options.arguments(reserved),
            maximum_concurrent_rpcs=self.options.max_calls,
        )
        for register, _ in self._services.values():
            register(server)
        self.health.register(server)
        names = (*self._services, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        bound = address.with_port(self._bind(server, address, encrypted=security.tls is not None))
        self._guard.start(bound)
        await server.start()
        self._server = server
        for service, (_, serving) in self._services.items():
            await self.health.set(service, serving)
        return str(bound)

    async def ended(self) -> None:
        """Wait until the server ends; raises the error that ended it."""
        if self._server is not None:
            await self._server.wait_for_termination()

    async def stop(self, grace: float = 0.0) -> None:
        """Report NOT_SERVING, refuse new calls, give open calls ``grace`` seconds, close."""
        server = self._server
        self._server = None
        if server is not None:
            await self.health.leave()
            await server.stop(grace)
            self._guard.stop()

    def _security(self) -> Security:
        """What new connections and calls need, at this moment."""
        return self.options.security or installed()

    def _bind(self, server: grpc.aio.Server, address: Address, *, encrypted: bool) -> int:
        credentials = server_credentials(lambda: self._security().used_tls) if encrypted else None
        with _binding(address):
            if credentials is None:
                return server.add_insecure_port(str(address))
            return server.add_secure_port(str(address), credentials)


@contextmanager
def _binding(address: Address) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise Rejected(
            "address",
            f"cannot listen on {address}, most likely because another process does:"
            " stop it, or choose another port (0 takes any free one)",
        ) from error
