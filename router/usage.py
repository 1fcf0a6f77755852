"""The account of a whole request, derived from those of its legs (docs/accounting.md, I6)."""

from __future__ import annotations

from collections.abc import Sequence

from protos import types_pb2


def usage(
    legs: Sequence[types_pb2.LegUsage], prompt: int, completion: int, first_token_seconds: float
) -> types_pb2.Usage:
    """``cached_prompt_tokens`` is the first leg's hit: a transfer between legs is no cache hit.

    It never exceeds the prompt: a resumed request may also hit blocks of its tokens so far.
    A leg that failed left no account (its ``length`` is 0). If it made tokens it was the first one
    all the same: what it found is not known, and what later legs loaded is no hit.
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
