"""``kvrelay replay FILE``: repeat a journal on a fresh core, and compare every outcome.

The core is pure, so equal calls and equal lookup answers must give equal plans, counters and
accounts. The first event that differs is reported, with both versions of what differs.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import UnionType
from typing import TypeVar, get_args, get_origin, get_type_hints

from kvrelay.engine.core.blocks import Naming
from kvrelay.engine.core.external import Query
from kvrelay.engine.core.journal import VERSION, Journal, Json, Record, is_empty
from kvrelay.engine.core.plan import EngineLimits, Plan
from kvrelay.engine.core.request import Finish, Order
from kvrelay.errors import Rejected

LONGEST_LINE = 1 << 26  # characters
MOST_BLOCKS = 1 << 24
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Difference:
    """Line ``line`` of the journal (from 1) says ``recorded``; the core now gives ``replayed``."""

    line: int
    call: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.call}: recorded {self.recorded}, replayed {self.replayed}"


@dataclass(frozen=True, slots=True)
class Replayed:
    """What was repeated; ``difference`` is ``None`` if every outcome was equal."""

    events: int
    steps: int
    preemptions: int
    ended: int
    difference: Difference | None

    def __str__(self) -> str:
        outcome = "all equal" if self.difference is None else f"then {self.difference}"
        return (
            f"{self.events} events, {self.steps} steps, {self.preemptions} preemptions,"
            f" {self.ended} requests ended: {outcome}"
        )


@dataclass(frozen=True, slots=True)
class JournalEvent:
    """A call of the scheduler, its arguments, the answers that it got, and its outcome."""

    call: str
    given: Record
    answers: list[int | None]
    cancels: list[bool]
    result: Record


def apply(function: Callable[..., T], given: Json, what: str) -> T:
    """Call a function or dataclass with the fields of a JSON object, as its parameters are typed.

    Raises ``Rejected`` if a field is missing or of another type. Other fields are ignored.
    """
    if not isinstance(given, dict):
        raise Rejected("journal", f"{what} is not an object")
    hints = get_type_hints(function)
    hints.pop("return", None)
    for name, hint in hints.items():
        if name not in given:
            raise Rejected("journal", f"{what} lacks {name!r}")
        if not _fits(given[name], hint):
            raise Rejected("journal", f"{name!r} of {what} is not of type {hint}")
    return function(**{name: given[name] for name in hints})


def _fits(value: Json, hint: type) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(_fits(value, part) for part in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    return isinstance(value, origin or hint) and (hint is bool or not isinstance(value, bool))


class Replay:
    """A journal in, a journal out; the two are compared line by line."""

    def __init__(self, limits: EngineLimits) -> None:
        self._written: list[str] = []
        self._answers: list[int | None] = []
        self._cancels: list[bool] = []
        self._plan: Plan | None = None
        self.core = Journal(limits, _naming(), self._answer, self._written.append, self._cancel)
        self._calls: dict[str, Callable[..., None]] = {
            "submit": self._submit,
            "abort": self._abort,
            "schedule": self._schedule,
            "commit": self._commit,
            "discard": self._discard,
            "loaded": self._loaded,
            "saved": self._saved,
        }

    def repeat(self, event: JournalEvent) -> Record | None:
        """Carry out one call; returns what the core writes about it now."""
        call = self._calls.get(event.call)
        if call is None:
            raise Rejected("journal", f"no call is named {event.call!r}")
        self._written.clear()
        self._answers = list(event.answers)
        self._cancels = list(event.cancels)
        apply(call, event.given, event.call)
        return _parse(self._written[-1]) if self._written else None

    def _answer(self, query: Query) -> int | None:
        """The next recorded answer; ``None`` once the core has taken another path."""
        return self._answers.pop(0) if self._answers else None

    def _cancel(self, request_id: str, epoch: int) -> bool:
        return self._cancels.pop(0) if self._cancels else False

    def _submit(
        self,
        id: str,
        tokens: list[int],
        prompt_len: int,
        max_tokens: int,
        ending: list[int],
        prefill_only: bool,
        save: bool,
        space: str,
    ) -> None:
        order = Order(
            id,
            tuple(tokens),
            prompt_len,
            max_tokens,
            frozenset(ending),
            prefill_only,
            save,
            space.encode(),
        )
        with suppress(Rejected):  # the core records it, and the records are compared
            self.core.submit(order)

    def _abort(self, id: str, finish: str) -> None:
        if finish not in (known.value for known in Finish):
            raise Rejected("journal", f"no request ends with {finish!r}")
        self.core.abort(id, Finish(finish))

    def _schedule(self) -> None:
        if self._plan is not None and is_empty(self._plan):
            self.core.discard()  # the commit of an empty plan changes nothing and is not written
        self._plan = self.core.schedule()

    def _commit(self, sampled: list[int | None]) -> None:
        plan = self._plan
        self._plan = None
        if plan is not None and len(plan.entries) == len(sampled):
            self.core.commit(plan, sampled)

    def _discard(self) -> None:
        self._plan = None
        self.core.discard()

    def _loaded(self, id: str, epoch: int, valid: int) -> None:
        self.core.loaded(id, epoch, valid)

    def _saved(self, id: str, epoch: int, serial: int) -> None:
        self.core.saved(id, epoch, serial)


def replay(lines: Iterable[str]) -> Replayed:
    """Repeat a journal to its end or its first difference. ``Rejected`` if it is not a journal."""
    records = _records(lines)
    again = Replay(_limits(next(records, (1, {}))[1]))
    events = steps = ended = 0
    difference = None
    for number, record in records:
        try:
            event = apply(JournalEvent, record, "the record")
            finished = event.result.get("ended", {})
            if not isinstance(finished, dict):
                raise Rejected("journal", "'ended' of the result is not an object")
            difference = _difference(again, number, event)
        except Rejected as error:
            raise Rejected("journal", f"line {number}: {error.message}") from error
        if difference is not None:
            break
        events += 1
        steps += event.call == "commit"
        ended += len(finished)
    return Replayed(events, steps, again.core.preemptions, ended, difference)


def _difference(again: Replay, line: int, recorded: JournalEvent) -> Difference | None:
    """Repeat one call: the answers it used, then each field of its result, are compared."""

    def differs(before: object, after: object) -> Difference:
        return Difference(line, recorded.call, str(before), str(after))

    try:
        written = again.repeat(recorded)
    except RuntimeError as error:
        return differs("an outcome", f"refused: {error}")
    if written is None:
        return differs("an outcome", "nothing was to be done")
    replayed = apply(JournalEvent, written, "the core's record")
    if recorded.answers != replayed.answers:
        return differs(f"answers {recorded.answers}", f"answers {replayed.answers}")
    if recorded.cancels != replayed.cancels:
        return differs(f"cancels {recorded.cancels}", f"cancels {replayed.cancels}")
    for name in {**recorded.result, **replayed.result}:
        before, after = recorded.result.get(name), replayed.result.get(name)
        if before != after:
            return differs(f"{name} {before}", after)
    return None


def _records(lines: Iterable[str]) -> Iterator[tuple[int, Record]]:
    """Numbered records, without a last line that the worker's death cut off."""
    for number, line in enumerate(lines, 1):
        if line.endswith("\n"):
            yield number, _parse(line, number)
        elif len(line) >= LONGEST_LINE:
            raise Rejected("journal", f"line {number} is longer than {LONGEST_LINE} characters")


def _parse(line: str, number: int = 0) -> Record:
    try:
        record: Json = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Rejected("journal", f"line {number} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise Rejected("journal", f"line {number} is not an object")
    return record


def _limits(record: Record) -> EngineLimits:
    if record.get("journal") != VERSION:
        raise Rejected("journal", f"its first line must say journal version {VERSION}")
    limits = apply(EngineLimits, record.get("limits"), "'limits'")
    if limits.block_size < 1 or not 1 <= limits.num_blocks <= MOST_BLOCKS:
        pool = f"{limits.num_blocks} blocks of {limits.block_size}"
        raise Rejected("journal", f"its first line has a pool of {pool}")
    return limits


def _naming() -> Naming:
    """Any chain that tells blocks apart gives the same plans: only equality of names matters."""

    def child(parent: bytes, tokens: Sequence[int]) -> bytes:
        return hashlib.sha256(parent + repr(list(tokens)).encode()).digest()

    return Naming(b"replay", child, lambda space: Naming(b"replay" + space, child))


def main(argv: Sequence[str], as_json: bool = False) -> int:
    """0 if every event was equal, 1 if one differs, 2 if the file is not a journal."""
    if len(argv) != 1:
        print("usage: python -m kvrelay.engine.core.replay FILE", file=sys.stderr)
        return 2
    try:
        with open(argv[0], encoding="utf-8", errors="replace") as file:
            done = replay(iter(lambda: file.readline(LONGEST_LINE), ""))
    except (OSError, Rejected) as error:
        said = error.strerror if isinstance(error, OSError) else error
        print(f"kvrelay replay: {argv[0]}: {said}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(done)) if as_json else done)
    return 0 if done.difference is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
