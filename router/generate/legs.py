"""One leg on a worker of either role, as one stream of events; closing it ends the call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace

import grpc

from kvrelay.errors import DeadlineExceeded, KvrelayError, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.status import NothingListens, checked_response, from_rpc_error, sent_by_server
from kvrelay.rpc.tracing import OFF, Span
from kvrelay.v1 import decode_pb2, prefill_pb2, types_pb2
from router.config import out_of_time
from router.generate.spans import account_attributes, leg_span
from router.workers.health import WorkerLost
from router.workers.link import LegStream
from router.workers.worker import KnownWorker, LegCall

UNFINISHED = types_pb2.FINISH_REASON_UNSPECIFIED


@dataclass(frozen=True, slots=True)
class LegOrder:
    """A leg to run. ``work``: its tokens in placement. ``positions``: what its request stores (D5).

    ``handoff_wait``: seconds from a prefill leg's first token to its handoff, at most. ``span``:
    the parent of the leg's span.
    """

    leg: types_pb2.Leg
    handoff: types_pb2.Handoff
    work: int
    positions: int
    deadline: Deadline
    handoff_wait: float
    span: Span = OFF


@dataclass(frozen=True, slots=True)
class LegEvent:
    """An event of a leg; absent fields did not happen. ``admitted``: its account at admission."""

    tokens: Sequence[types_pb2.Token] = ()
    finish: types_pb2.FinishReason.ValueType = UNFINISHED
    admitted: types_pb2.LegUsage | None = None
    handoff: types_pb2.Handoff | None = None
    usage: types_pb2.LegUsage | None = None


def run_leg(worker: KnownWorker, order: LegOrder) -> AsyncGenerator[LegEvent]:
    """The events of a leg, the usage last. Raises ``KvrelayError``; closing it cancels the call.

    ``WorkerLost`` and ``WorkerSilent``: no status arrived; ``Draining``: the worker drains.
    """
    return _traced(worker, order) if order.span.on else _run(worker, order)


def refused(error: KvrelayError) -> bool:
    """Whether a leg that ended with this error before its admission has computed nothing.

    A worker sends the admission before it sends an error. If neither arrives, the leg may have
    computed. Errors of an unmodified vLLM are not looked at: such a leg may have computed.
    """
    cause = error.__cause__
    told = isinstance(cause, grpc.RpcError) and sent_by_server(cause)
    return told or isinstance(error, NothingListens)


def _run(worker: KnownWorker, order: LegOrder) -> AsyncGenerator[LegEvent]:
    if worker.role == types_pb2.ROLE_PREFILL:
        return _prefill(worker, order)
    return _decode(worker, order)


async def _traced(worker: KnownWorker, order: LegOrder) -> AsyncGenerator[LegEvent]:
    """Pass the events on in a span of the leg, with its account or what is known of a lost leg."""
    account, lost, generated = types_pb2.LegUsage(), True, 0
    name, attributes = leg_span(order.leg, worker.role, worker.address)
    with order.span.child(name, attributes, call=True) as span:
        try:
            async with aclosing(_run(worker, replace(order, span=span))) as events:
                async for event in events:
                    generated += len(event.tokens)
                    account = event.usage or event.admitted or account
                    lost = event.usage is None
                    if not lost:
                        span.complete()
                    yield event
        finally:
            span.set(account_attributes(account, generated, lost))


async def _prefill(worker: KnownWorker, order: LegOrder) -> AsyncGenerator[LegEvent]:
    with _counted(worker, order) as leg:
        request = prefill_pb2.PrefillRequest(leg=order.leg)
        call = worker.link.prefill(request, order.deadline.remaining(), order.span.metadata)
        messages = aiter(call)
        with leg.reading(call):
            await _arrival(worker, call, request.ByteSize())
            response = await _next(worker, messages)
            if response is not None and response.HasField("admitted"):
                yield LegEvent(admitted=response.admitted)
                response = await _next(worker, messages)
            if response is None or not response.HasField("first_token"):
                raise _incomplete(worker)
            first = response.first_token
            yield LegEvent((first.token,), first.finish_reason)
            try:
                async with asyncio.timeout(order.handoff_wait):
                    response = await _next(worker, messages)
            except TimeoutError:
                return  # the next leg runs without the handoff
            if response is None or not response.HasField("handoff"):
                raise _incomplete(worker)
            yield LegEvent(handoff=response.handoff, usage=response.usage)


async def _decode(worker: KnownWorker, order: LegOrder) -> AsyncGenerator[LegEvent]:
    complete = False
    with _counted(worker, order) as leg:
        request = decode_pb2.DecodeRequest(leg=order.leg, handoff=order.handoff)
        call = worker.link.decode(request, order.deadline.remaining(), order.span.metadata)
        with leg.reading(call):
            await _arrival(worker, call, request.ByteSize())
            async for message in call:
                worker.note_message()
                response = checked_response(message, worker.address)
                complete = response.HasField("usage")
                yield LegEvent(
                    response.tokens,
                    response.finish_reason,
                    response.admitted if response.HasField("admitted") else None,
                    usage=response.usage if complete else None,
                )
    if not complete:
        raise _incomplete(worker)


@contextmanager
def _counted(worker: KnownWorker, order: LegOrder) -> Iterator[LegCall]:
    """The leg is counted on the worker inside; gRPC errors are mapped."""
    with worker.leg(order.work, order.positions) as leg:
        try:
            yield leg
        except grpc.RpcError as error:
            raise _mapped(worker, leg, error) from error


async def _arrival(worker: KnownWorker, call: LegStream[object], size: int) -> None:
    """Wait until the worker has received the leg; it then sends its headers."""
    begun = time.monotonic()
    with worker.sending(size):
        await call.initial_metadata()  # also returns if the call ends first
    if not call.done():
        worker.arrived(size, time.monotonic() - begun)


async def _next(
    worker: KnownWorker, messages: AsyncIterator[prefill_pb2.PrefillResponse]
) -> prefill_pb2.PrefillResponse | None:
    async for message in messages:
        worker.note_message()
        return checked_response(message, worker.address)
    return None


def _incomplete(worker: KnownWorker) -> Unavailable:
    return Unavailable(f"{worker.address} ended its leg without a handoff or usage")


def _mapped(worker: KnownWorker, leg: LegCall, error: grpc.RpcError) -> KvrelayError:
    """A worker that was connected and sent no status of its own was lost during this leg."""
    mapped = from_rpc_error(error)
    if sent_by_server(error):
        return mapped
    if isinstance(mapped, Unavailable) and leg.connected:
        return WorkerLost(f"{worker.address} was lost: {mapped}")
    if isinstance(mapped, DeadlineExceeded):  # gRPC's text does not say which deadline
        return out_of_time("before the output was complete, which can be resumed")
    return mapped
