"""One leg on one worker of either role, as one kind of event. The call ends with its reader."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from kvrelay.errors import DeadlineExceeded, KvrelayError, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.status import checked_response, from_rpc_error, sent_by_server
from kvrelay.v1 import decode_pb2, prefill_pb2, types_pb2
from router.workers.leg_call import LegCall
from router.workers.loss import WorkerLost
from router.workers.worker import KnownWorker

Messages: TypeAlias = AsyncIterator[prefill_pb2.PrefillResponse]
Sent: TypeAlias = (
    "grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]"
    " | grpc.aio.UnaryStreamCall[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse]"
)
UNFINISHED = types_pb2.FINISH_REASON_UNSPECIFIED


@dataclass(frozen=True, slots=True)
class LegEvent:
    """News of a leg; whatever is absent did not happen."""

    tokens: Sequence[types_pb2.Token] = ()
    finish: types_pb2.FinishReason.ValueType = UNFINISHED
    usage: types_pb2.LegUsage | None = None
    handoff: types_pb2.Handoff | None = None
    begun: types_pb2.Admission | None = None  # with the first token


async def run_leg(
    worker: KnownWorker,
    work: int,
    leg: types_pb2.Leg,
    handoff: types_pb2.Handoff,
    deadline: Deadline,
    handoff_wait: float,
) -> AsyncGenerator[LegEvent]:
    """The events of a leg, the usage last. Raises ``KvrelayError``; closing it cancels the call.

    ``WorkerLost`` and ``Silent`` say that the worker did not speak; ``Draining`` that it leaves.
    """
    complete = False
    positions = len(leg.prompt_token_ids) + leg.max_tokens - 1
    with worker.stay(work, positions) as stay:
        if worker.role == types_pb2.ROLE_PREFILL:
            events = _prefill(worker, stay, leg, deadline, handoff_wait)
        else:
            events = _decode(worker, stay, leg, handoff, deadline)
        try:
            async with aclosing(events):
                async for event in events:
                    complete = event.usage is not None or event.handoff is not None
                    yield event
        except grpc.RpcError as error:
            raise _meaning(worker, stay, error) from error
    if not complete:
        raise Unavailable(f"{worker.address} ended its leg before its end")


def _meaning(worker: KnownWorker, stay: LegCall, error: grpc.RpcError) -> KvrelayError:
    """A worker that was reached and then said nothing of its own was lost under this leg."""
    meant = from_rpc_error(error)
    if sent_by_server(error):
        return meant
    if isinstance(meant, Unavailable) and stay.connected:
        return WorkerLost(f"{worker.address} was lost: {meant}")
    if isinstance(meant, DeadlineExceeded):  # gRPC names neither whose time it was, nor a way out
        return DeadlineExceeded(
            "the time of this request was over before its answer was: allow it more, as far as the"
            " router does (--default-timeout, --max-timeout), or resume it"
        )
    return meant


async def _prefill(
    worker: KnownWorker,
    stay: LegCall,
    leg: types_pb2.Leg,
    deadline: Deadline,
    handoff_wait: float,
) -> AsyncGenerator[LegEvent]:
    request = prefill_pb2.PrefillRequest(leg=leg)
    call = worker.prefill.Prefill(request, timeout=deadline.remaining())
    messages = aiter(call)
    stay.begin(call)
    try:
        await _arrival(worker, stay, call, request.ByteSize())
        response = await _next(worker, stay, messages)
        if response is not None and response.HasField("first_token"):
            first = response.first_token
            begun = first.admission if first.HasField("admission") else None
            yield LegEvent(tokens=(first.token,), finish=first.finish_reason, begun=begun)
            yield await _handoff(worker, stay, messages, handoff_wait)
    finally:
        call.cancel()  # without effect on a call that has ended


async def _handoff(
    worker: KnownWorker, stay: LegCall, messages: Messages, seconds: float
) -> LegEvent:
    """The end of a prefill leg; without one in time, the next leg begins with what it finds."""
    try:
        async with asyncio.timeout(seconds):
            response = await _next(worker, stay, messages)
    except TimeoutError:
        return LegEvent(handoff=types_pb2.Handoff())
    if response is None or not response.HasField("handoff"):
        return LegEvent()
    return LegEvent(usage=response.usage, handoff=response.handoff)


async def _arrival(worker: KnownWorker, stay: LegCall, call: Sent, size: int) -> None:
    """Until the worker has the leg; workers say so with their headers."""
    begun = time.monotonic()
    with worker.sending(size), stay.reading():
        await call.initial_metadata()  # also of a call that ended before
    if not call.done():
        worker.arrived(size, time.monotonic() - begun)


async def _next(
    worker: KnownWorker, stay: LegCall, messages: Messages
) -> prefill_pb2.PrefillResponse | None:
    with stay.reading():
        async for message in messages:
            worker.hear()
            return checked_response(message, worker.address)
    return None


async def _decode(
    worker: KnownWorker,
    stay: LegCall,
    leg: types_pb2.Leg,
    handoff: types_pb2.Handoff,
    deadline: Deadline,
) -> AsyncGenerator[LegEvent]:
    request = decode_pb2.DecodeRequest(leg=leg, handoff=handoff)
    call = worker.decode.Decode(request, timeout=deadline.remaining())
    stay.begin(call)
    try:
        await _arrival(worker, stay, call, request.ByteSize())
        with stay.reading():
            async for message in call:
                worker.hear()
                response = checked_response(message, worker.address)
                usage = response.usage if response.HasField("usage") else None
                begun = response.admission if response.HasField("admission") else None
                yield LegEvent(response.tokens, response.finish_reason, usage, begun=begun)
    finally:
        call.cancel()
