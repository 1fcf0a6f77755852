"""Repeats a journal on a fresh core and compares every outcome.

The core is pure, so equal calls and equal answers of the store must give equal plans, counters and
accounts. The first event that differs is told, with both versions of what differs.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields

from kvrelay.engine.core.external import Query
from kvrelay.engine.core.journal import VERSION, Journal, Json, Record, is_empty
from kvrelay.engine.core.plan import EngineLimits, Plan
from kvrelay.engine.core.request import Finish, Naming, Order
from kvrelay.errors import Rejected

LONGEST_LINE = 1 << 26  # characters
MOST_BLOCKS = 1 << 24


@dataclass(frozen=True, slots=True)
class Difference:
    """Line ``line`` of the journal (from 1) says ``recorded``; the core now does ``replayed``."""

    line: int
    call: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.call}: recorded {self.recorded}, replayed {self.replayed}"


@dataclass(frozen=True, slots=True)
class Replayed:
    """What was repeated; ``difference`` is ``None`` when all of it came out the same."""

    events: int
    steps: int
    preemptions: int
    ended: int
    difference: Difference | None

    def __str__(self) -> str:
        verdict = "every one the same" if self.difference is None else f"then {self.difference}"
        return (
            f"{self.events} events, {self.steps} steps, {self.preemptions} preemptions,"
            f" {self.ended} requests ended: {verdict}"
        )


class Replay:
    """A journal in, a journal out; the two are compared line by line."""

    def __init__(self, limits: EngineLimits) -> None:
        self._told: list[str] = []
        self._said: list[int | None] = []
        self._plan: Plan | None = None
        self.core = Journal(limits, _naming(), self._answer, self._told.append)

    def repeat(self, record: Record) -> Record | None:
        """Carry out one call; what the core writes about it now."""
        self._told.clear()
        given = _table(record, "given")
        self._said = _answers(record)
        call = _text(record, "call")
        if call not in _CALLS:
            raise Rejected("journal", f"no call is named {call!r}")
        _CALLS[call](self, given)
        if not self._told:
            return None
        return _parse(self._told[-1])

    def _answer(self, query: Query) -> int | None:
        """The recorded answers in their order; beyond them the core has gone another way."""
        return self._said.pop(0) if self._said else None

    def _submit(self, given: Record) -> None:
        order = Order(
            _text(given, "id"),
            tuple(_ints(given, "tokens")),
            _int(given, "prompt_len"),
            _int(given, "max_tokens"),
            frozenset(_ints(given, "ending")),
            _flag(given, "prefill_only"),
            _flag(given, "save"),
            _text(given, "space").encode(),
        )
        try:
            self.core.submit(order)
        except Rejected:
            return  # as written in the journal, and compared there

    def _abort(self, given: Record) -> None:
        finish = {one.value: one for one in Finish}.get(_text(given, "finish"))
        if finish is None:
            raise Rejected("journal", f"{given['finish']!r} is no way to end")
        self.core.abort(_text(given, "id"), finish)

    def _schedule(self, given: Record) -> None:
        self._leave()
        self._plan = self.core.schedule()

    def _commit(self, given: Record) -> None:
        plan = self._plan
        self._plan = None
        sampled = [item if isinstance(item, int) else None for item in _list(given, "sampled")]
        if plan is not None and len(plan.entries) == len(sampled):
            self.core.commit(plan, sampled)

    def _discard(self, given: Record) -> None:
        self._plan = None
        self.core.discard()

    def _loaded(self, given: Record) -> None:
        self.core.loaded(_text(given, "id"), _int(given, "epoch"), _int(given, "valid"))

    def _saved(self, given: Record) -> None:
        self.core.saved(_text(given, "id"), _int(given, "epoch"), _int(given, "serial"))

    def _leave(self) -> None:
        """The commit of an empty plan is not written; it changes nothing."""
        if self._plan is not None and is_empty(self._plan):
            self.core.discard()


_CALLS: dict[str, Callable[[Replay, Record], None]] = {
    "submit": Replay._submit,
    "abort": Replay._abort,
    "schedule": Replay._schedule,
    "commit": Replay._commit,
    "discard": Replay._discard,
    "loaded": Replay._loaded,
    "saved": Replay._saved,
}


def replay(lines: Iterable[str]) -> Replayed:
    """Repeat a journal up to its end or its first difference. ``Rejected``: it is not a journal."""
    records = _records(lines)
    again = Replay(_limits(next(records, (1, {}))[1]))
    events = steps = ended = 0
    difference = None
    for number, record in records:
        difference = _repeated(again, number, record)
        if difference is not None:
            break
        events += 1
        steps += record["call"] == "commit"
        ended += len(_table(_table(record, "result"), "ended", {}))
    return Replayed(events, steps, again.core.preemptions, ended, difference)


def _repeated(again: Replay, number: int, record: Record) -> Difference | None:
    """One call on the core, and how it differs; a call that cannot follow there differs too."""
    try:
        return _compare(number, record, again.repeat(record))
    except Rejected as error:
        raise Rejected("journal", f"line {number}: {error.message}") from error
    except RuntimeError as error:
        return Difference(number, _text(record, "call"), "an outcome", f"refused: {error}")


def _records(lines: Iterable[str]) -> Iterator[tuple[int, Record]]:
    """Numbered records. A last line that was cut off, the worker having died, is left out."""
    for number, line in enumerate(lines, 1):
        if line.endswith("\n"):
            yield number, _parse(line, number)
        elif len(line) >= LONGEST_LINE:
            raise Rejected("journal", f"line {number} is longer than {LONGEST_LINE} characters")


def _parse(line: str, number: int = 0) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Rejected("journal", f"line {number} is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise Rejected("journal", f"line {number} is no record")
    return record


def _limits(record: Record) -> EngineLimits:
    if record.get("journal") != VERSION:
        raise Rejected("journal", f"its first line must say journal version {VERSION}")
    given = _table(record, "limits")
    limits = EngineLimits(**{field.name: _int(given, field.name) for field in fields(EngineLimits)})
    if limits.block_size < 1 or not 1 <= limits.num_blocks <= MOST_BLOCKS:
        pool = f"{limits.num_blocks} blocks of {limits.block_size}"
        raise Rejected("journal", f"its first line tells of a pool of {pool}")
    return limits


def _compare(line: int, recorded: Record, replayed: Record | None) -> Difference | None:
    """The first part that is not the same: the answers used, then each field of the result."""
    call = _text(recorded, "call")
    if replayed is None:
        return Difference(line, call, "an outcome", "nothing was to be done")
    if recorded["answers"] != replayed["answers"]:
        return Difference(
            line, call, f"answers {recorded['answers']}", f"answers {replayed['answers']}"
        )
    before, after = _table(recorded, "result"), _table(replayed, "result")
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            return Difference(line, call, f"{name} {before.get(name)}", f"{after.get(name)}")
    return None


def _naming() -> Naming:
    """Any chain that tells blocks apart gives the same plans: names decide by equality only."""

    def child(parent: bytes, tokens: Sequence[int]) -> bytes:
        return hashlib.sha256(parent + repr(list(tokens)).encode()).digest()

    return Naming(b"replay", child, lambda space: Naming(b"replay" + space, child))


def _value(record: Record, name: str) -> Json:
    if name not in record:
        raise Rejected("journal", f"a record lacks {name!r}")
    return record[name]


def _table(record: Record, name: str, default: Record | None = None) -> Record:
    value = record.get(name, default) if default is not None else _value(record, name)
    if not isinstance(value, dict):
        raise Rejected("journal", f"{name!r} is no table")
    return value


def _list(record: Record, name: str) -> list[Json]:
    value = _value(record, name)
    if not isinstance(value, list):
        raise Rejected("journal", f"{name!r} is no list")
    return value


def _answers(record: Record) -> list[int | None]:
    values = _list(record, "answers")
    found = [value for value in values if value is None or isinstance(value, int)]
    if len(found) != len(values):
        raise Rejected("journal", "'answers' holds more than whole numbers and null")
    return found


def _ints(record: Record, name: str) -> list[int]:
    values = _list(record, name)
    found = [value for value in values if isinstance(value, int)]
    if len(found) != len(values):
        raise Rejected("journal", f"{name!r} holds more than whole numbers")
    return found


def _flag(record: Record, name: str) -> bool:
    value = _value(record, name)
    if not isinstance(value, bool):
        raise Rejected("journal", f"{name!r} is neither true nor false")
    return value


def _int(record: Record, name: str) -> int:
    value = _value(record, name)
    if not isinstance(value, int):
        raise Rejected("journal", f"{name!r} is no whole number")
    return value


def _text(record: Record, name: str) -> str:
    value = _value(record, name)
    if not isinstance(value, str):
        raise Rejected("journal", f"{name!r} is no text")
    return value


def main(argv: Sequence[str], as_json: bool = False) -> int:
    """0 when every event came out the same, 1 when one differs, 2 when it is not a journal."""
    if len(argv) != 1:
        print("usage: python -m kvrelay.engine.core.replay FILE", file=sys.stderr)
        return 2
    try:
        with open(argv[0], encoding="utf-8", errors="replace") as file:
            done = replay(iter(lambda: file.readline(LONGEST_LINE), ""))
    except (OSError, Rejected) as error:
        print(f"{argv[0]}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(done)) if as_json else done)
    return 0 if done.difference is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
