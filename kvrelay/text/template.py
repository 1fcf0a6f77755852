"""The arguments of a chat template that a request gives as JSON: bounded, and without our own."""

from __future__ import annotations

import json
from collections.abc import Set
from typing import NoReturn, cast

from kvrelay.errors import Rejected
from kvrelay.tools import depth_of

FIELD = "chat.template_kwargs"
MAX_BYTES = 16 << 10
MAX_DEPTH = 16

RESERVED_ARGUMENTS = frozenset(
    {
        *("self", "conversations", "messages"),  # of the functions that render
        *("raise_exception", "strftime_now"),  # functions that templates call, as the next ones
        *("range", "dict", "lipsum", "cycler", "joiner", "namespace", "tojson"),
    }
)


def template_arguments(text: str, reserved: Set[str]) -> dict[str, object]:
    """The arguments; raises ``Rejected`` naming the bound or the name that is not allowed."""
    if (size := len(text.encode("utf-8", "replace"))) > MAX_BYTES:
        raise Rejected(FIELD, f"at most {MAX_BYTES} bytes of JSON, got {size}")
    try:
        value = json.loads(text, parse_constant=_not_json)
    except RecursionError:
        raise Rejected(FIELD, f"at most {MAX_DEPTH} levels deep, got hundreds") from None
    except ValueError as error:
        raise Rejected(FIELD, f"is not JSON: {error}, got {text!r:.80}") from None
    if not isinstance(value, dict):
        raise Rejected(FIELD, f"must be a JSON object, got {text!r:.80}")
    if (depth := depth_of(value)) > MAX_DEPTH:
        raise Rejected(FIELD, f"at most {MAX_DEPTH} levels deep, got {depth}")
    for name in sorted(value.keys() & reserved):
        raise Rejected(f"{FIELD}.{name}", "is set by this server: leave it out")
    return cast("dict[str, object]", value)


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
