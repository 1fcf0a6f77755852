"""Life cycle of a gRPC server: bind, serve with health and reflection, drain, stop.

    server = Server(ServerOptions("127.0.0.1:0"))
    server.add(SERVICE, lambda s: add_DecodeServiceServicer_to_server(servicer, s))
    address = await server.start()            # "127.0.0.1:41234"
    await serve_until_signal(server, ready=lambda address: f"decode worker ready at {address}")

Every handler runs inside ``kvrelay.rpc.server.errors.Guard``: raise a ``KvrelayError`` and the
status is right.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
from grpc_reflection.v1alpha import reflection

from kvrelay.errors import Rejected
from kvrelay.rpc import keepalive
from kvrelay.rpc.address import Address
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.health import HealthService
from kvrelay.rpc.security.policy import Security, installed
from kvrelay.rpc.security.tls import TlsCredentials
from kvrelay.rpc.server.authorization import AuthInterceptor
from kvrelay.rpc.server.errors import ErrorInterceptor
from kvrelay.rpc.server.leavers import quiet_grpc_log
from kvrelay.rpc.server.workarounds import tolerate_bad_method_names

MIB = 1 << 20
CALLS = 4096
PARTS = 8  # of all calls, one for each tenant, and one for strangers
log = logging.getLogger("kvrelay.rpc")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """``security`` is what this process has installed, unless another one is given."""

    address: str = "127.0.0.1:0"
    max_message_bytes: int = 8 * MIB
    max_connections: int = 2048  # each may have some hundred KiB read before they are understood
    max_concurrent_streams: int = 1024  # of one connection
    max_calls: int = CALLS  # of all of them; one more is told to retry
    greeting_seconds: float = 20.0  # in which a connection has to begin to speak HTTP/2
    keepalive_seconds: float = 15.0
    keepalive_timeout_seconds: float = 15.0
    ping_seconds: float = keepalive.PING_SECONDS
    stuck_seconds: float = 120.0  # after which a stream ends of which nothing is read
    security: Security | None = None

    def arguments(self) -> list[tuple[str, int]]:
        """Channel arguments of gRPC core."""
        return [
            ("grpc.so_reuseport", 0),  # a taken port must be an error, not a shared port
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_concurrent_streams", self.max_concurrent_streams),
            ("grpc.server_handshake_timeout_ms", round(self.greeting_seconds * 1000)),
            *keepalive.arguments(
                self.keepalive_seconds, self.keepalive_timeout_seconds, self.ping_seconds
            ),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
        ]


class Server:
    """One ``grpc.aio`` server. Add services, then ``start``; ``stop`` may be called twice."""

    def __init__(self, options: ServerOptions | None = None) -> None:
        self.options = options or ServerOptions()
        self.health = HealthService()
        self._services: dict[str, tuple[Callable[[grpc.aio.Server], None], bool]] = {}
        self._server: grpc.aio.Server | None = None

    def add(
        self, service: str, register: Callable[[grpc.aio.Server], None], serving: bool = True
    ) -> None:
        """Serve ``service`` (``kvrelay.v1.DecodeService``); its health says ``serving``."""
        self._services[service] = register, serving

    async def start(self) -> str:
        """Bind and serve; the address with the port bound. ``Rejected`` if it cannot be had."""
        address = Address.parse(self.options.address)
        security = self.options.security or installed()
        security.check_listen(address)
        part = max(self.options.max_calls // PARTS, 1)
        gate = AuthInterceptor(security.credentials, part, max(self.options.max_calls - part, 1))
        quiet_grpc_log()
        tolerate_bad_method_names()
        server = grpc.aio.server(
            interceptors=(gate, ErrorInterceptor(self.options.stuck_seconds)),
            options=self.options.arguments(),
            maximum_concurrent_rpcs=self.options.max_calls,
        )
        for register, _ in self._services.values():
            register(server)
        self.health.register(server)
        names = (*self._services, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        bound = address.with_port(self._bind(server, address, security.tls))
        await server.start()
        self._server = server
        for service, (_, serving) in self._services.items():
            await self.health.set(service, serving)
        return str(bound)

    async def ended(self) -> None:
        """Wait for its end; raises what it died of."""
        if self._server is not None:
            await self._server.wait_for_termination()

    async def stop(self, grace: float = 0.0) -> None:
        """Say NOT_SERVING, take no new calls, give those under way ``grace`` seconds, close."""
        server = self._server
        self._server = None
        if server is not None:
            await self.health.leave()
            await server.stop(grace)

    def _bind(self, server: grpc.aio.Server, address: Address, tls: TlsCredentials | None) -> int:
        credentials = None if tls is None else tls.server()
        try:
            if credentials is not None:
                return server.add_secure_port(str(address), credentials)
            return server.add_insecure_port(str(address))
        except RuntimeError as error:
            raise Rejected(
                "address",
                f"cannot listen on {address}, most likely another process does:"
                " stop it, or choose another port (0 takes any free one)",
            ) from error


async def serve_until_signal(
    server: Server,
    ready: Callable[[str], str],
    on_stop: Callable[[Deadline], Awaitable[None]] | None = None,
    grace: float = 10.0,
) -> int:
    """Start, print the line ``ready`` makes of the address, serve until SIGTERM or SIGINT; 0.

    Whatever ends the server itself ends the process, with 1: none lives on without its port.

    What the process holds by then is kept from the garbage collector for good.
    Then NOT_SERVING is said, ``on_stop`` may drain until its deadline (it is cancelled there), and
    what is left of ``grace`` goes to the calls under way. A second signal stops at once.
    """
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    gc.collect()
    gc.freeze()  # what there is now stays, and with torch loaded a look through it takes 0.3 s
    print(ready(await server.start()), flush=True)
    signalled, ended = map(asyncio.ensure_future, (stopping.wait(), server.ended()))
    await asyncio.wait((signalled, ended), return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        log.error("the server ended by itself: %r", ended.exception())
        return 1
    deadline = Deadline.after(grace)
    drained = asyncio.ensure_future(_drain(server, on_stop, deadline))
    hurried = asyncio.ensure_future(hurry.wait())
    await asyncio.wait((drained, hurried), return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if drained.done():
        drained.result()  # what went wrong on the way is not to be hidden
    else:
        drained.cancel()
        await server.stop(0.0)
    return 0


async def _drain(
    server: Server, on_stop: Callable[[Deadline], Awaitable[None]] | None, deadline: Deadline
) -> None:
    await server.health.leave()
    try:
        if on_stop is not None:
            async with asyncio.timeout(deadline.remaining()):
                await on_stop(deadline)
    except TimeoutError:
        log.warning("not drained in time: the calls under way are cut")
    finally:
        await server.stop(deadline.remaining())
