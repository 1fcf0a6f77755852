"""Asks a server for its health (``grpc.health.v1``)."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2

from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.status import from_rpc_error

_CHECK = "/grpc.health.v1.Health/Check"
_SERVING = health_pb2.HealthCheckResponse.SERVING


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
