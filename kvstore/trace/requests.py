"""Request traces in the format of Mooncake's release: one JSON object a line, in order of time.

``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens), and ``hash_ids``: the prompt's
blocks of 512 tokens, each id standing for its block and all before it. The last may be partial.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kvrelay.errors import Rejected

BLOCK_TOKENS = 512
ID_BYTES = 8
LENGTHS = ("timestamp", "input_length", "output_length")
MOST = 10**15


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line; ``at`` in seconds from the start of the trace, ``names`` as in a store."""

    at: float
    tokens: int
    output: int
    names: tuple[bytes, ...]


def read_trace(path: Path, limit: int | None = None) -> Iterator[TraceRequest]:
    """The first ``limit`` requests of a file; ``Rejected`` names a line that is not a request."""
    last = 0.0
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(islice(lines, limit), 1):
                request = _request(line, f"{path}:{number}")
                if request.at < last:
                    raise Rejected("trace", f"{path}:{number}: earlier than the line before it")
                last = request.at
                yield request
    except (OSError, UnicodeDecodeError) as error:
        raise Rejected("trace", f"{path} cannot be read: {error}") from error


def _request(line: str, where: str) -> TraceRequest:
    try:
        row = json.loads(line)
        at, tokens, output = (_number(row, name) for name in LENGTHS)
        ids = row["hash_ids"]
        if not isinstance(ids, list) or not all(type(one) is int for one in ids):
            raise ValueError("hash_ids is no list of whole numbers")
        if len(set(ids)) < len(ids):
            raise ValueError("hash_ids has one twice, but each stands for all before it")
        names = tuple(one.to_bytes(ID_BYTES, "little") for one in ids)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise Rejected(
            "trace",
            f"{where}: not a request ({type(error).__name__}: {error}); wanted is an object with"
            " timestamp, input_length, output_length and hash_ids",
        ) from error
    return TraceRequest(at / 1000, int(tokens), int(output), names)


def _number(row: dict[str, object], name: str) -> float:
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
        raise ValueError(f"{name} is {str(value)[:40]} and not between 0 and {MOST:.0e}")
    return value
