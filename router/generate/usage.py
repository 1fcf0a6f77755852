"""The usage of a whole request, derived from that of its legs (docs/accounting.md, I6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrelay.rpc.protocol import Role
from kvrelay.v1 import types_pb2


def lost_leg(
    worker_id: str,
    address: str,
    role: Role,
    generated: int,
    admitted: types_pb2.LegUsage | None,
) -> types_pb2.LegUsage:
    """The usage of a leg whose worker did not report it: as of its admission and its tokens.

    A leg that generated a token has computed all that it was admitted to compute, and a position
    for each further token. Of a leg without one it is not known how far it came. Of a leg whose
    admission did not arrive nothing is known, which ``admission_unknown`` says.
    """
    leg = types_pb2.LegUsage(admission_unknown=admitted is None)
    if admitted is not None:
        leg.CopyFrom(admitted)
        if generated:
            leg.executed = admitted.computed + generated - 1
            leg.admissions[0].frontier = admitted.length + generated - 1
    leg.worker_id = worker_id
    leg.address = address
    leg.role = role
    leg.generated = generated
    leg.lost = True
    return leg


def request_usage(
    legs: Sequence[types_pb2.LegUsage],
    prompt: int,
    cached: int | None,
    completion: int,
    waited: float,
    first_token_seconds: float,
) -> types_pb2.Usage:
    """``waited``: in this router's queue, which ``queue_seconds`` includes.

    A lost leg whose admission did not arrive is taken to have computed nothing.
    """
    begun = begun_of(legs)
    first = begun[0] if begun else types_pb2.LegUsage()
    return types_pb2.Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_prompt_tokens=cached,
        legs=legs,
        queue_seconds=waited + first.queue_seconds,
        prefill_seconds=first.run_seconds,
        transfer_seconds=sum(leg.load_seconds for leg in begun[1:]),
        first_token_seconds=first_token_seconds,
        recomputed=_recomputed(legs),
    )


def hit_of(legs: Sequence[types_pb2.LegUsage]) -> int | None:
    """Tokens that the first leg found; ``None`` if it did not tell, or not yet.

    A transfer between legs is no cache hit.
    """
    begun = begun_of(legs)
    if not begun or begun[0].admission_unknown:
        return None
    return begun[0].local + begun[0].external


def begun_of(legs: Sequence[types_pb2.LegUsage]) -> list[types_pb2.LegUsage]:
    """The legs that computed something, as far as is known."""
    return [leg for leg in legs if leg.generated or not leg.admission_unknown]


def samples_usage(
    usages: Mapping[int, types_pb2.Usage], leader: int, ended_tokens: int
) -> types_pb2.Usage:
    """The usage of a request for several samples, from that of each sample.

    The prompt, its hits and the times are those of the ``leader``, which ran as a single request
    does; output tokens and recomputed positions are sums. ``ended_tokens`` are those of samples
    that a client has whole. The legs are by sample, then in order of time.
    """
    whole = types_pb2.Usage()
    whole.CopyFrom(usages[leader])
    whole.completion_tokens = ended_tokens + sum(one.completion_tokens for one in usages.values())
    whole.recomputed = sum(one.recomputed for one in usages.values())
    del whole.legs[:]
    for sample in sorted(usages):
        for leg in usages[sample].legs:
            leg.sample = sample
            whole.legs.append(leg)
    return whole


def _recomputed(legs: Sequence[types_pb2.LegUsage]) -> int:
    """Executed positions less distinct ones. A residency executed those from hit to frontier."""
    executed = distinct = end = 0
    runs = [(run.local + run.external, run.frontier) for leg in legs for run in leg.admissions]
    for start, stop in sorted(runs):
        executed += max(0, stop - start)
        distinct += max(0, stop - max(start, end))
        end = max(end, stop)
    return executed - distinct
