"""One leg on one worker of either role, as one kind of event. The call ends with its reader."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import grpc

from common.errors import Unavailable
from protos import decode_pb2, prefill_pb2, types_pb2
from router.worker import KnownWorker
from rpc.deadline import Deadline
from rpc.message import received
from rpc.status import from_rpc_error

UNFINISHED = types_pb2.FINISH_REASON_UNSPECIFIED


@dataclass(frozen=True, slots=True)
class Handoff:
    """What the prefill leg leaves for the next one."""

    tokens: int = 0
    last_name: bytes = b""


@dataclass(frozen=True, slots=True)
class Event:
    """News of a leg; whatever is absent did not happen."""

    tokens: Sequence[types_pb2.Token] = ()
    finish: types_pb2.FinishReason.ValueType = UNFINISHED
    usage: types_pb2.LegUsage | None = None
    handoff: Handoff | None = None


async def run_leg(
    worker: KnownWorker, leg: types_pb2.Leg, handoff: Handoff, deadline: Deadline
) -> AsyncGenerator[Event]:
    """The events of a leg, the usage last. Raises ``KvrelayError``; closing it cancels the call."""
    prefills = worker.role == types_pb2.ROLE_PREFILL
    events = (
        _prefill(worker, leg, deadline) if prefills else _decode(worker, leg, handoff, deadline)
    )
    complete = False
    with worker.occupied(len(leg.prompt_token_ids) + len(leg.output_token_ids)):
        try:
            async with aclosing(events):
                async for event in events:
                    complete = event.usage is not None
                    yield event
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
    if not complete:
        raise Unavailable(f"{worker.address} ended its leg before its end")


async def _prefill(
    worker: KnownWorker, leg: types_pb2.Leg, deadline: Deadline
) -> AsyncGenerator[Event]:
    request = prefill_pb2.PrefillRequest(leg=leg)
    call = worker.prefill.Prefill(request, timeout=deadline.remaining())
    try:
        async for message in call:
            response = received(message, worker.address)
            if response.HasField("first_token"):
                first = response.first_token
                yield Event(tokens=(first.token,), finish=first.finish_reason)
            elif response.HasField("handoff"):
                end = response.handoff
                yield Event(usage=end.usage, handoff=Handoff(end.tokens, end.last_name))
    finally:
        call.cancel()  # without effect on a call that has ended


async def _decode(
    worker: KnownWorker, leg: types_pb2.Leg, handoff: Handoff, deadline: Deadline
) -> AsyncGenerator[Event]:
    request = decode_pb2.DecodeRequest(
        leg=leg, handoff_tokens=handoff.tokens, handoff_last_name=handoff.last_name
    )
    call = worker.decode.Decode(request, timeout=deadline.remaining())
    try:
        async for message in call:
            response = received(message, worker.address)
            usage = response.usage if response.HasField("usage") else None
            yield Event(tokens=response.tokens, finish=response.finish_reason, usage=usage)
    finally:
        call.cancel()
