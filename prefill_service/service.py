"""The ``PrefillService``, defined in protos/kvrelay/v1/prefill.proto."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import TypeAlias

import grpc

from kvrelay.engine.core.updates import Admitted, Ended, Token
from kvrelay.rpc import tracing
from kvrelay.rpc.server.server import Server
from kvrelay.v1 import prefill_pb2, prefill_pb2_grpc, types_pb2
from kvrelay.worker import convert
from kvrelay.worker.worker import Worker

Context: TypeAlias = (
    "grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]"
)
SERVICE = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name


class PrefillService(prefill_pb2_grpc.PrefillServiceServicer):
    """Computes prompts, samples one token each, and saves the blocks."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse]:
        await context.send_initial_metadata(())  # the leg has arrived
        headers = tracing.headers_of(context)
        running = self._worker.run(types_pb2.ROLE_PREFILL, request.leg, None, headers)
        async with running as batches:
            async for batch in batches:
                for update in batch:
                    yield self._response(update, request.leg)

    def _response(
        self, update: Admitted | Token | Ended, leg: types_pb2.Leg
    ) -> prefill_pb2.PrefillResponse:
        if isinstance(update, Admitted):
            return prefill_pb2.PrefillResponse(admitted=self._worker.admitted(update, leg))
        if isinstance(update, Token):
            first = prefill_pb2.FirstToken(
                token=convert.token(update.sampled), finish_reason=convert.finish(update.finish)
            )
            return prefill_pb2.PrefillResponse(first_token=first)
        return prefill_pb2.PrefillResponse(
            handoff=self._worker.handoff(leg, update), usage=self._worker.usage(update, leg)
        )


def register(server: Server, worker: Worker) -> None:
    """Add the service to a worker's server."""
    add = partial(prefill_pb2_grpc.add_PrefillServiceServicer_to_server, PrefillService(worker))
    server.add(SERVICE, add, serving=worker.identity.role == types_pb2.ROLE_PREFILL)
