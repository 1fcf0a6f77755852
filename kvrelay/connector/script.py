"""The script of a ``MockConnector`` as a JSON file: what ``--store mock:FILE`` reads.

    {"store": "kvrelay://127.0.0.1:50052",
     "lookups": {"*": ["ask"], "r1": [null, null, 8], "r2": [1000000]},
     "loads":   {"r1": [{"amount": 4, "missed": "expired", "after": 2, "times": 2, "strays": [1]}],
                 "r2": [{"after": 9, "cancels": false}]},
     "saves":   {"r2": [{"amount": 0}]},
     "misses":  {"r1": ["evicted"]},
     "reverse": true}

Every part is optional. ``kvrelay.connector.mock`` says what the lines do. ``store`` moves the
bytes: a load gives what the store gave or less, so the tokens of an answer are right whatever the
script says. Without a store every load fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvrelay.connector.mock import MockEnd, Script
from kvrelay.errors import Rejected
from kvrelay.usage import Miss

PREFIX = "mock:"
LARGEST_FILE = 1 << 20
LONGEST_WAIT = 10_000  # polls
MOST_TIMES = 1_000
PARTS = {"store", "lookups", "loads", "saves", "misses", "reverse"}
MOCK_END = {"amount", "after", "times", "strays", "missed", "cancels"}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MockConfig:
    """A script, and the URL of the store that it distorts."""

    script: Script
    store: str | None


def read_script(url: str) -> MockConfig:
    """The script at ``mock:FILE``; ``Rejected`` names what is wrong in it."""
    path = Path(url.removeprefix(PREFIX))
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise Rejected("store", f"{path} is larger than {LARGEST_FILE} bytes")
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Rejected("store", f"{path}: {error}") from error
    try:
        return parse_script(parsed)
    except Rejected as error:
        raise Rejected("store", f"{path}: {error}") from error


def parse_script(parsed: object) -> MockConfig:
    """A script from parsed JSON."""
    parts = _table("script", parsed, PARTS)
    store, reverse = parts.get("store"), parts.get("reverse", False)
    if store is not None and (not isinstance(store, str) or store.startswith(PREFIX)):
        raise Rejected("store", "must be the URL of a real store")
    if not isinstance(reverse, bool):
        raise Rejected("reverse", f"{reverse!r} is neither true nor false")
    script = Script(
        lookups=_lines("lookups", parts, _answer),
        loads=_lines("loads", parts, _mock_end),
        saves=_lines("saves", parts, _mock_end),
        misses=_lines("misses", parts, _miss),
        reverse=reverse,
    )
    return MockConfig(script, store)


def _lines(
    field: str, parts: Mapping[str, object], parse: Callable[[str, object], T]
) -> dict[str, Sequence[T]]:
    found: dict[str, Sequence[T]] = {}
    for request_id, lines in _table(field, parts.get(field, {})).items():
        where = f"{field}.{request_id}"
        if not isinstance(lines, list) or not lines:
            raise Rejected(where, "must be a list with at least one line")
        found[request_id] = [parse(f"{where}[{at}]", line) for at, line in enumerate(lines)]
    return found


def _answer(where: str, line: object) -> int | str | None:
    return line if line is None or line == "ask" else _number(where, line)


def _mock_end(where: str, line: object) -> MockEnd:
    given = _table(where, line, MOCK_END)
    amount, strays = given.get("amount"), given.get("strays", [])
    cancels = given.get("cancels", True)
    if not isinstance(cancels, bool):
        raise Rejected(f"{where}.cancels", f"{cancels!r} is neither true nor false")
    if not isinstance(strays, list) or len(strays) > MOST_TIMES:
        raise Rejected(f"{where}.strays", f"must be a list of at most {MOST_TIMES} numbers")
    return MockEnd(
        amount=None if amount is None else _number(f"{where}.amount", amount),
        after=_number(f"{where}.after", given.get("after", 0), 0, LONGEST_WAIT),
        times=_number(f"{where}.times", given.get("times", 1), 0, MOST_TIMES),
        strays=tuple(_number(f"{where}.strays", by) for by in strays),
        missed=_miss(f"{where}.missed", given.get("missed", Miss.UNKNOWN.value)),
        cancels=cancels,
    )


def _miss(where: str, line: object) -> Miss:
    known = {miss.value: miss for miss in Miss}
    if not isinstance(line, str) or line not in known:
        raise Rejected(where, f"{line!r} is none of {', '.join(known)}")
    return known[line]


def _number(where: str, line: object, low: int = -(1 << 31), high: int = 1 << 31) -> int:
    if not isinstance(line, int) or isinstance(line, bool) or not low <= line <= high:
        raise Rejected(where, f"{line!r} is no whole number in {low} .. {high}")
    return line


def _table(where: str, line: object, known: set[str] | None = None) -> dict[str, object]:
    if not isinstance(line, dict):
        raise Rejected(where, "must be a table")
    if known is not None and (strange := line.keys() - known):
        raise Rejected(
            where, f"has no {sorted(strange)[0]!r}; these are: {', '.join(sorted(known))}"
        )
    return line
