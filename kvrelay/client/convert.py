"""From the protocol's messages to the values that applications see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvrelay.rpc.protocol import role_name
from kvrelay.usage import LegAdmission, LegUsage, Miss, MissedBlocks, StoreTokens, Usage
from kvrelay.v1 import types_pb2

FinishReason = Literal["stop", "length"]
_FINISH: dict[int, FinishReason] = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
}
_PREFIX = "MISS_"


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
    return Logprobs(_logprob(message.chosen), tuple(map(_logprob, message.top)))


def _logprob(message: types_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob)


def usage_of(message: types_pb2.Usage) -> Usage:
    """The account of an answer."""
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_prompt_tokens=message.cached_prompt_tokens,
        legs=tuple(map(leg_usage_of, message.legs)),
        queue_seconds=message.queue_seconds,
        prefill_seconds=message.prefill_seconds,
        transfer_seconds=message.transfer_seconds,
        first_token_seconds=message.first_token_seconds,
    )


def leg_usage_of(message: types_pb2.LegUsage) -> LegUsage:
    """The account of one leg."""
    return LegUsage(
        worker_id=message.worker_id,
        address=message.address,
        role=role_name(message.role),
        length=message.length,
        local=message.local,
        external=message.external,
        computed=message.computed,
        recomputed=message.recomputed,
        generated=message.generated,
        failed=message.failed,
        preemptions=message.preemptions,
        executed=message.executed,
        admissions=tuple(map(_admission, message.admissions)),
        queue_seconds=message.queue_seconds,
        load_seconds=message.load_seconds,
        run_seconds=message.run_seconds,
        saved=message.saved if message.HasField("saved") else None,
        external_by_store=tuple(
            StoreTokens(entry.store, entry.tokens) for entry in message.external_by_store
        ),
        missed=tuple(MissedBlocks(_miss(entry.reason), entry.blocks) for entry in message.missed),
        lost=message.lost,
    )


def _admission(message: types_pb2.Admission) -> LegAdmission:
    return LegAdmission(
        epoch=message.epoch,
        length=message.length,
        local=message.local,
        external=message.external,
        fresh=message.fresh,
        frontier=message.frontier,
    )


def _miss(reason: types_pb2.Miss.ValueType) -> Miss:
    """A reason that this release does not know is ``UNKNOWN``."""
    try:
        return Miss[types_pb2.Miss.Name(reason).removeprefix(_PREFIX)]
    except (KeyError, ValueError):
        return Miss.UNKNOWN
