"""The account of a whole request, derived from those of its legs (DESIGN.md, I6)."""

from __future__ import annotations

from collections.abc import Sequence

from protos import types_pb2


def usage(
    legs: Sequence[types_pb2.LegUsage], prompt: int, completion: int, first_token_seconds: float
) -> types_pb2.Usage:
    """``cached_prompt_tokens`` is the first leg's hit: a transfer between legs is no cache hit.

    It never exceeds the prompt: a resumed request may also hit blocks of its tokens so far.
    Legs that failed left no account (their ``length`` is 0) and are listed only.
    """
    told = [leg for leg in legs if leg.length]
    first = told[0] if told else types_pb2.LegUsage()
    return types_pb2.Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_prompt_tokens=min(first.local + first.external, prompt),
        legs=legs,
        queue_seconds=first.queue_seconds,
        prefill_seconds=first.run_seconds,
        transfer_seconds=sum(leg.load_seconds for leg in told[1:]),
        first_token_seconds=first_token_seconds,
    )
