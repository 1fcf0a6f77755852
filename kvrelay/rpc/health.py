"""Health of a server and its services (``grpc.health.v1``): the server's and the asker's side."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.status import from_rpc_error

_CHECK = "/grpc.health.v1.Health/Check"
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class HealthService:
    """What this server says of itself; the service ``""`` stands for the whole server."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()

    def register(self, server: grpc.aio.Server) -> None:
        """Add the health service to a server that has not been started."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set(self, service: str, serving: bool) -> None:
        """From now on answer this for ``service``."""
        await self._servicer.set(service, _SERVING if serving else _NOT_SERVING)

    async def leave(self) -> None:
        """Answer NOT_SERVING for everything, for good."""
        await self._servicer.enter_graceful_shutdown()


async def is_serving(
    channel: grpc.aio.Channel, deadline: Deadline, service: str = "", *, wait: bool = False
) -> bool:
    """Ask once; ``wait`` for a connection until the deadline. Raises ``KvrelayError``."""
    check = channel.unary_unary(
        _CHECK,
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        answer = await check(request, timeout=deadline.remaining(), wait_for_ready=wait)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    return bool(answer.status == _SERVING)
