"""The ``DecodeService``, defined in protos/kvrelay/v1/decode.proto."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import TypeAlias

import grpc

from kvrelay.engine.core.updates import Admitted, Ended
from kvrelay.rpc import tracing
from kvrelay.rpc.server.server import Server
from kvrelay.v1 import decode_pb2, decode_pb2_grpc, types_pb2
from kvrelay.worker import convert
from kvrelay.worker.streams import LegUpdates
from kvrelay.worker.worker import Worker

Context: TypeAlias = "grpc.aio.ServicerContext[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse]"
SERVICE = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name


class DecodeService(decode_pb2_grpc.DecodeServiceServicer):
    """Loads the blocks that were computed elsewhere, and decodes the rest of the answer."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: Context
    ) -> AsyncGenerator[decode_pb2.DecodeResponse]:
        await context.send_initial_metadata(())  # the leg has arrived
        leg, headers = request.leg, tracing.headers_of(context)
        running = self._worker.run(types_pb2.ROLE_DECODE, leg, request.handoff, headers)
        async with running as batches:
            async for batch in batches:
                yield self._response(batch, leg)

    def _response(self, updates: LegUpdates, leg: types_pb2.Leg) -> decode_pb2.DecodeResponse:
        response = decode_pb2.DecodeResponse()
        for update in updates:
            if isinstance(update, Admitted):
                response.admitted.CopyFrom(self._worker.admitted(update, leg))
            elif isinstance(update, Ended):
                response.usage.CopyFrom(self._worker.usage(update, leg))
            else:
                response.tokens.append(convert.token(update.sampled))
                response.finish_reason = convert.finish(update.finish)
        return response


def register(server: Server, worker: Worker) -> None:
    """Add the service to a worker's server."""
    add = partial(decode_pb2_grpc.add_DecodeServiceServicer_to_server, DecodeService(worker))
    server.add(SERVICE, add, serving=worker.identity.role == types_pb2.ROLE_DECODE)
