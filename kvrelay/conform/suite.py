"""A run of all checks: one row a check, greedy and sampled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvrelay.conform.abilities import Abilities, Inquiry
from kvrelay.conform.checks import (
    CACHED,
    CHECKS,
    KINDS,
    RESTART,
    USAGE,
    Check,
    Subject,
    restarts,
    shared_prefixes,
)
from kvrelay.conform.exam import ConformPlan, Exam
from kvrelay.conform.tally import ConformOutcome, NotSupported, NotTried, Tally
from kvrelay.errors import KvrelayError
from kvrelay.load.http_door import HttpDoor

ALL = "all"
PASSED, DIFFERED, NO_VERDICT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Row:
    """A check's tallies by kind of sampling, or one of ``ALL`` answers."""

    name: str
    title: str
    tallies: dict[str, Tally]

    def cells(self) -> list[Tally | None]:
        """Of greedy and sampled requests; one of all requests comes first."""
        if ALL in self.tallies:
            return [self.tallies[ALL], None]
        return [self.tallies.get(kind) for kind in KINDS]


class ConformWatcher:
    """What a run tells while it goes on; the command prints it."""

    def begins(self, abilities: Abilities, model: str) -> None:
        """The server answers."""

    def works_at(self, what: str) -> None:
        """Before each step."""

    def ends(self, row: Row) -> None:
        """A check has its verdict."""


@dataclass(slots=True)
class ConformRun:
    """``only``: names of checks; others are left out. ``rows`` grow with the run."""

    door: HttpDoor
    plan: ConformPlan
    watcher: ConformWatcher
    only: Collection[str]
    rows: list[Row] = field(default_factory=list)
    exam: Exam | None = None

    async def run(self) -> None:
        """Raises ``KvrelayError`` if the server answers nothing."""
        self.watcher.works_at("what the server can do")
        abilities = await Inquiry(self.door, self.plan.timeout).run()
        if not self.plan.sampled:
            abilities.missing["seed"] = "left out"
        self.watcher.begins(abilities, self.door.model)
        exam = Exam(self.door, abilities, self.plan)
        self.exam = exam
        subjects = [await self._subject(exam, kind) for kind in KINDS]
        for check in CHECKS:
            if check.name not in self.only:
                continue
            row = Row(check.name, check.title, {kind: Tally() for kind in check.kinds})
            for kind, tally in row.tallies.items():
                subject = subjects[KINDS.index(kind)]
                self.watcher.works_at(f"{check.title}, {kind}")
                if subject is None:
                    tally.reason = abilities.missing["seed"]
                    tally.tried = self.plan.sampled
                    continue
                await _judge([tally], subject, partial(_disturb, check, tally))
            self._add(row)
        await self._finish(exam, subjects)

    async def _subject(self, exam: Exam, kind: str) -> Subject | None:
        """``None`` if the server has no seeds."""
        if kind == "sampled" and not exam.abilities.has("seed"):
            return None
        self.watcher.works_at(f"prompts alone, {kind}")
        return await Subject.ask(exam, kind == "sampled")

    async def _finish(self, exam: Exam, subjects: Sequence[Subject | None]) -> None:
        """The checks of all answers, and the restart behind which none is cached."""
        name, title = RESTART
        known = [subject for subject in subjects if subject is not None]
        if name in self.only:
            row = Row(name, title, {kind: Tally() for kind in KINDS[: len(known)]})
            tallies = list(row.tallies.values())
            self.watcher.works_at(title)
            await _judge(tallies, known[0], lambda _: restarts(known, tallies))
            self._add(row)
        for (name, title), tally in ((CACHED, exam.cached), (USAGE, exam.usage)):
            if name not in self.only:
                continue
            self.watcher.works_at(title)
            if (why := exam.abilities.missing.get(name)) is not None:
                tally.reason = why
            elif name == "cached":
                await _judge([tally], known[0], lambda s: shared_prefixes(s, exam.cached))
            self._add(Row(name, title, {ALL: tally}))

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self.watcher.ends(row)

    def status(self) -> int:
        """0: all that was compared is exact; 1: something differs; 2: no verdict."""
        outcomes = {tally.outcome for row in self.rows for tally in row.tallies.values()}
        if ConformOutcome.DIFFERS in outcomes:
            return DIFFERED
        if ConformOutcome.FAILED in outcomes or ConformOutcome.EXACT not in outcomes:
            return NO_VERDICT
        return PASSED


async def _disturb(check: Check, tally: Tally, subject: Subject) -> None:
    await check.disturb(subject, tally)


async def _judge(
    tallies: Sequence[Tally], subject: Subject, run: Callable[[Subject], Awaitable[None]]
) -> None:
    """Carry out a check; a server that does not answer gives no verdict."""
    try:
        await run(subject)
    except NotSupported as error:
        for tally in tallies:
            tally.reason = str(error)
            tally.tried = not isinstance(error, NotTried)
    except (KvrelayError, OSError) as error:  # TimeoutError is one
        for tally in tallies:
            tally.error = str(error) or "the server did not answer in time"
    except ExceptionGroup as group:
        for tally in tallies:
            tally.error = str(group.exceptions[0])
