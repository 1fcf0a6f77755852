"""From the protocol's messages to the values that applications see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, TypeVar

from google.protobuf.message import Message

from kvrelay.fleet import (
    FleetStatus,
    QueueStatus,
    RouterTotals,
    WorkerInfo,
    WorkerLoad,
    WorkerNamespace,
    WorkerState,
    WorkerStatus,
)
from kvrelay.rpc.protocol import NAMES, role_name
from kvrelay.tools import ToolCallDelta
from kvrelay.usage import LegAdmission, LegUsage, Miss, MissedBlocks, StoreTokens, Usage
from kvrelay.v1 import router_pb2, types_pb2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    D = TypeVar("D", bound=DataclassInstance)

FinishReason = Literal["stop", "length", "tool_calls"]
_FINISH: dict[int, FinishReason] = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
_STATES: dict[int, WorkerState] = {
    router_pb2.WORKER_STATE_STARTING: "starting",
    router_pb2.WORKER_STATE_READY: "ready",
    router_pb2.WORKER_STATE_DRAINING: "draining",
    router_pb2.WORKER_STATE_SUSPECT: "suspect",
    router_pb2.WORKER_STATE_UNREACHABLE: "unreachable",
}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability in the raw distribution."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of one output token: the chosen one and the likeliest, likeliest first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


def finish_reason_of(reason: types_pb2.FinishReason.ValueType) -> FinishReason | None:
    """``None`` while the answer is not complete."""
    return _FINISH.get(reason)


def logprobs_of(message: types_pb2.Logprobs) -> Logprobs:
    """The log probabilities of one token."""
    top = tuple(_copy(TokenLogprob, entry) for entry in message.top)
    return Logprobs(_copy(TokenLogprob, message.chosen), top)


def call_delta_of(message: router_pb2.ToolCallDelta) -> ToolCallDelta:
    """A part of a call."""
    function = message.function
    return ToolCallDelta(message.index, message.id, function.name, function.arguments)


def usage_of(message: types_pb2.Usage) -> Usage:
    """The account of an answer."""
    cached = message.cached_prompt_tokens if message.HasField("cached_prompt_tokens") else None
    legs = tuple(map(leg_usage_of, message.legs))
    return _copy(Usage, message, cached_prompt_tokens=cached, legs=legs)


def leg_usage_of(message: types_pb2.LegUsage) -> LegUsage:
    """The account of one leg."""
    stores = message.external_by_store
    return _copy(
        LegUsage,
        message,
        role=role_name(message.role),
        admissions=tuple(_copy(LegAdmission, entry) for entry in message.admissions),
        saved=message.saved if message.HasField("saved") else None,
        external_by_store=tuple(_copy(StoreTokens, entry) for entry in stores),
        missed=tuple(MissedBlocks(_miss(entry.reason), entry.blocks) for entry in message.missed),
    )


def fleet_of(message: router_pb2.ListWorkersResponse) -> FleetStatus:
    """A router's workers, its queue and its counts."""
    workers = tuple(map(worker_status_of, message.workers))
    queue, totals = _copy(QueueStatus, message.queue), _copy(RouterTotals, message.totals)
    return FleetStatus(workers, queue, totals)


def worker_status_of(message: router_pb2.WorkerStatus) -> WorkerStatus:
    """One worker as its router sees it."""
    info = message.info
    namespace = _copy(WorkerNamespace, info.namespace)
    return _copy(
        WorkerStatus,
        message,
        role=NAMES.get(message.role),
        state=_STATES.get(message.state, "unknown"),
        info=_copy(WorkerInfo, info, namespace=namespace) if message.HasField("info") else None,
        load=_copy(WorkerLoad, message.load),
    )


def _copy(kind: type[D], message: Message, **converted: object) -> D:
    """A ``kind`` with the message's fields of the same names, but with ``converted`` ones."""
    names = (field.name for field in fields(kind) if field.name not in converted)
    make: Callable[..., D] = kind
    return make(**{name: getattr(message, name) for name in names}, **converted)


def _miss(reason: types_pb2.Miss.ValueType) -> Miss:
    """A reason that this release does not know is ``UNKNOWN``."""
    try:
        return Miss[types_pb2.Miss.Name(reason).removeprefix("MISS_")]
    except (KeyError, ValueError):
        return Miss.UNKNOWN
