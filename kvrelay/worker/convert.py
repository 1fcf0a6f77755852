"""Converts between messages and the engine's values, and checks the fields of a leg."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace

from kvrelay.engine.core.request import Admission, Finish, Order
from kvrelay.engine.core.updates import Admitted, Ended, Logprob, Sampled
from kvrelay.errors import Rejected
from kvrelay.rpc.protocol import check_ids, sampling_of
from kvrelay.sampling import Sampling
from kvrelay.usage import Miss, MissedBlocks
from kvrelay.v1 import types_pb2

_FINISH: dict[Finish, types_pb2.FinishReason.ValueType] = {
    Finish.STOP: types_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: types_pb2.FINISH_REASON_LENGTH,
}

_MISS: dict[Miss, types_pb2.Miss.ValueType] = {
    miss: types_pb2.Miss.Value(f"MISS_{miss.name}") for miss in Miss
}

MAX_REQUEST_ID = 256
SALT_BYTES = 32


def sampling(message: types_pb2.Sampling, eos_token_ids: tuple[int, ...]) -> Sampling:
    """The sampling of a message; absent fields take ``Sampling``'s defaults, the seed is drawn."""
    given = sampling_of(message, eos_token_ids)
    return given if message.HasField("seed") else replace(given, seed=secrets.randbits(64))


def order(
    leg: types_pb2.Leg,
    engine_id: str,
    given: Sampling,
    prefill_only: bool,
    save: bool,
    space: bytes,
) -> Order:
    """The engine's order of a leg; ``engine_id`` is the leg's id in this engine only.

    ``space`` is that of the leg's tenant.
    """
    return Order(
        request_id=engine_id,
        tokens=(*leg.prompt_token_ids, *leg.output_token_ids),
        prompt_len=len(leg.prompt_token_ids),
        max_tokens=leg.max_tokens,
        ending=frozenset(given.ending_token_ids),
        prefill_only=prefill_only,
        save=save,
        space=space,
    )


def check_leg(leg: types_pb2.Leg, vocab_size: int, longest: int) -> None:
    """Raise ``Rejected`` naming the first field that no worker could serve."""
    if len(leg.request_id) > MAX_REQUEST_ID:
        raise Rejected("leg.request_id", f"at most {MAX_REQUEST_ID} characters")
    if len(leg.tenant_salt) not in (0, SALT_BYTES):
        raise Rejected("leg.tenant_salt", f"must have {SALT_BYTES} bytes, or none")
    if leg.sampling.bad_words:
        raise Rejected("leg.sampling.bad_words", "must be in bad_word_ids: the router makes these")
    if not leg.prompt_token_ids:
        raise Rejected("leg.prompt_token_ids", "must have at least one token")
    if leg.max_tokens <= len(leg.output_token_ids):
        raise Rejected(
            "leg.max_tokens",
            f"must be more than the {len(leg.output_token_ids)} output tokens so far,"
            f" got {leg.max_tokens}",
        )
    if (count := len(leg.prompt_token_ids) + len(leg.output_token_ids)) > longest:
        raise Rejected(
            "leg.prompt_token_ids", f"{count} tokens, more than the model's {longest} positions"
        )
    check_ids("leg.prompt_token_ids", leg.prompt_token_ids, vocab_size)
    check_ids("leg.output_token_ids", leg.output_token_ids, vocab_size)


def token(sampled: Sampled) -> types_pb2.Token:
    """A token, with its log probabilities if it carries any."""
    if sampled.logprob is None:
        return types_pb2.Token(id=sampled.token)
    chosen = _logprob(Logprob(sampled.token, sampled.logprob))
    return types_pb2.Token(
        id=sampled.token,
        logprobs=types_pb2.Logprobs(chosen=chosen, top=[_logprob(item) for item in sampled.top]),
    )


def admission_message(admission: Admission, frontier: int = 0) -> types_pb2.Admission:
    """An admission; with the ``frontier`` of its residency once that has ended."""
    return types_pb2.Admission(
        epoch=admission.epoch,
        length=admission.length,
        local=admission.local,
        external=admission.external,
        fresh=admission.fresh,
        frontier=frontier,
    )


def _logprob(item: Logprob) -> types_pb2.TokenLogprob:
    return types_pb2.TokenLogprob(token_id=item.token, logprob=item.logprob)


def finish(reason: Finish | None) -> types_pb2.FinishReason.ValueType:
    """The finish reason; unspecified while the request runs."""
    return types_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH[reason]


def admitted_usage(
    admitted: Admitted, worker: str, role: types_pb2.Role.ValueType, explain: bool = False
) -> types_pb2.LegUsage:
    """The account of a leg at its admission."""
    admission = admitted.admission
    return types_pb2.LegUsage(
        worker_id=worker,
        role=role,
        length=admission.length,
        local=admission.local,
        external=admission.external,
        computed=admission.fresh,
        admissions=[admission_message(admission)],
        external_by_store=_by_store(admitted.sources),
        missed=_missed(admitted.missed if explain else None),
    )


def leg_usage(
    ended: Ended, worker: str, role: types_pb2.Role.ValueType, explain: bool = False
) -> types_pb2.LegUsage:
    """The account of a leg; with ``explain`` also the reasons of missed blocks."""
    tokens, timing = ended.tokens, ended.timing
    return types_pb2.LegUsage(
        worker_id=worker,
        role=role,
        length=tokens.length,
        local=tokens.local,
        external=tokens.external,
        computed=tokens.computed,
        recomputed=tokens.recomputed,
        generated=tokens.generated,
        failed=tokens.failed,
        preemptions=ended.preemptions,
        executed=tokens.executed,
        admissions=[admission_message(run.admission, run.frontier) for run in tokens.runs],
        queue_seconds=timing.queue,
        load_seconds=timing.load,
        run_seconds=timing.run,
        saved=ended.saved,
        external_by_store=_by_store(ended.sources),
        missed=_missed(ended.missed if explain else None),
    )


def _by_store(sources: Mapping[str, int]) -> list[types_pb2.StoreTokens]:
    return [types_pb2.StoreTokens(store=store, tokens=count) for store, count in sources.items()]


def _missed(missed: MissedBlocks | None) -> list[types_pb2.MissedBlocks]:
    if missed is None:
        return []
    return [types_pb2.MissedBlocks(reason=_MISS[missed.reason], blocks=missed.blocks)]
