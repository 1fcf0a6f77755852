"""The usage of a whole request, derived from that of its legs (docs/accounting.md, I6)."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.rpc.protocol import Role
from kvrelay.v1 import types_pb2


def lost_leg(
    worker_id: str,
    address: str,
    role: Role,
    generated: int,
    admission: types_pb2.Admission | None,
) -> types_pb2.LegUsage:
    """The usage of a leg whose worker did not report it: as of its first token."""
    leg = types_pb2.LegUsage(
        worker_id=worker_id, address=address, role=role, generated=generated, lost=True
    )
    if admission is not None:
        leg.length = admission.length
        leg.local = admission.local
        leg.external = admission.external
        leg.computed = admission.fresh
        leg.admissions.append(admission)
    return leg


def request_usage(
    legs: Sequence[types_pb2.LegUsage], prompt: int, completion: int, first_token_seconds: float
) -> types_pb2.Usage:
    """``cached_prompt_tokens`` is the first leg's hit: a transfer between legs is no cache hit.

    It never exceeds the prompt: a resumed request may also hit blocks of its tokens so far.
    A lost leg left nothing but its admission, which arrived with its first token.
    """
    begun = [leg for leg in legs if leg.length or leg.generated]
    first = begun[0] if begun else types_pb2.LegUsage()
    return types_pb2.Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_prompt_tokens=min(first.local + first.external, prompt),
        legs=legs,
        queue_seconds=first.queue_seconds,
        prefill_seconds=first.run_seconds,
        transfer_seconds=sum(leg.load_seconds for leg in begun[1:]),
        first_token_seconds=first_token_seconds,
    )
