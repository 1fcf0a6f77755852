"""The usage of an answer, for people and for scripts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields

from kvrelay.cli.screen import paint
from kvrelay.usage import LegAdmission, LegUsage, Miss, MissedBlocks, StoreTokens, Usage

WIDE = ("epoch", "executed")  # 64-bit numbers, which the JSON of protobuf has as text


def usage_json(usage: Usage) -> dict[str, object]:
    """Every field of a usage that is known, zeros too, as protobuf's JSON has it."""
    return _known(usage)


def _json(value: object, name: str) -> object:
    match value:
        case Miss():
            return f"MISS_{value.name}"
        case tuple():
            return [_json(item, name) for item in value]
        case LegUsage() | LegAdmission() | MissedBlocks() | StoreTokens():
            return _known(value)
    if name == "role":
        return f"ROLE_{value}".upper()
    return str(value) if name in WIDE else value


def _known(
    value: Usage | LegUsage | LegAdmission | MissedBlocks | StoreTokens,
) -> dict[str, object]:
    own = ((field.name, getattr(value, field.name)) for field in fields(value))
    return {name: _json(item, name) for name, item in own if item is not None}


def cached_of(usage: Usage) -> str:
    """The number of cached prompt tokens, for people."""
    return "?" if usage.cached_prompt_tokens is None else str(usage.cached_prompt_tokens)


def usage_lines(usage: Usage) -> str:
    """A usage as lines of text."""
    head = (
        f"{usage.prompt_tokens} prompt tokens, {cached_of(usage)} of them cached;"
        f" {usage.completion_tokens} new; first token {usage.first_token_seconds * 1e3:.0f} ms"
    )
    legs = (line for leg in usage.legs for line in _leg(leg))
    return "\n".join((paint(head, "dim", sys.stderr), *legs))


def _leg(leg: LegUsage) -> Iterator[str]:
    where = f"  {leg.role:<8} {leg.address or leg.worker_id:<16}"
    if leg.admission_unknown:
        yield f"{where} lost before it reported what it found"
        return
    yield (
        f"{where} {leg.length} ="
        f" {leg.local} local + {leg.external} external + {leg.computed} computed"
        + _stores(leg)
        + (f", {leg.recomputed} recomputed" if leg.recomputed else "")
        + (f", {leg.failed} failed" if leg.failed else "")
        + (", lost" if leg.lost else "")
    )
    for missed in leg.missed:
        blocks = f"{missed.blocks} block{'' if missed.blocks == 1 else 's'}"
        yield f"           {blocks} missed: {missed.reason.value}"


def _stores(leg: LegUsage) -> str:
    """Which of several stores the external tokens came from."""
    if len(leg.external_by_store) < 2:
        return ""
    parts = (f"{one.tokens} from {one.store}" for one in leg.external_by_store)
    return f" ({', '.join(parts)})"
