"""The account of an answer, for people and for scripts."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from google.protobuf.json_format import MessageToDict

from kvrelay.cli.screen import paint
from kvrelay.rpc.protocol import role_name
from kvrelay.v1 import types_pb2


def usage_json(usage: types_pb2.Usage) -> dict[str, object]:
    """Every field of a usage, zeros too."""
    made: dict[str, object] = MessageToDict(
        usage, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return made


def usage_lines(usage: types_pb2.Usage) -> str:
    """A usage as a person reads it."""
    head = (
        f"{usage.prompt_tokens} prompt tokens, {usage.cached_prompt_tokens} of them cached;"
        f" {usage.completion_tokens} new; first token {usage.first_token_seconds * 1e3:.0f} ms"
    )
    legs = (line for leg in usage.legs for line in _leg(leg))
    return "\n".join((paint(head, "dim", sys.stderr), *legs))


def _leg(leg: types_pb2.LegUsage) -> Iterator[str]:
    yield (
        f"  {role_name(leg.role):<8} {leg.address or leg.worker:<16} {leg.length} ="
        f" {leg.local} local + {leg.external} external + {leg.computed} computed"
        + _stores(leg)
        + (f", {leg.recomputed} recomputed" if leg.recomputed else "")
        + (f", {leg.failed} failed" if leg.failed else "")
        + (", lost on the way" if leg.lost else "")
    )
    for missed in leg.missed:
        blocks = f"{missed.blocks} block{'' if missed.blocks == 1 else 's'}"
        yield f"           {blocks} missed: {_reason(missed.reason)}"


def _stores(leg: types_pb2.LegUsage) -> str:
    """Which of several stores the external tokens came from."""
    if len(leg.external_by_store) < 2:
        return ""
    parts = (f"{one.tokens} from {one.store}" for one in leg.external_by_store)
    return f" ({', '.join(parts)})"


def _reason(miss: types_pb2.Miss.ValueType) -> str:
    """As docs/accounting.md and the metrics call it."""
    return types_pb2.Miss.Name(miss).removeprefix("MISS_").lower()
