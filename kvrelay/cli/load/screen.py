"""What ``kvrelay load`` prints: a line of progress, a table for each level, one of the sweep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from kvrelay.cli.load.output import LiveLine, wrapped
from kvrelay.cli.screen import paint, print_out, table
from kvrelay.load.check import AnswerCheck
from kvrelay.load.driver import LoadDriver
from kvrelay.load.figures import DECIMAL, LevelFigures, Objectives
from kvrelay.load.report import LATENCIES, csv_row, peak_of, seconds_of, verdict
from kvrelay.load.request import LoadAnswer
from kvrelay.load.run import LoadWatcher

TICK, SLOW_TICK = 0.5, 10.0  # seconds between two lines, on a terminal and elsewhere
LIVE = ("TTFT", "ITL")
PARTS = ("mean", "p50", "p90", "p99", "max")


class RowWriter(Protocol):
    """The part of ``csv.writer`` that is used."""

    def writerow(self, row: Sequence[object], /) -> object: ...


class LoadScreen(LoadWatcher):
    """Progress to standard error, tables to standard output, rows to ``rows``."""

    def __init__(self, objectives: Objectives, progress: bool) -> None:
        self._objectives = objectives
        self.rows: RowWriter | None = None
        self._line = LiveLine(progress)
        self._driver: LoadDriver | None = None
        self._seen = (0.0, 0)  # a moment and the tokens until then
        self._begun = 0.0

    def level_begins(self, driver: LoadDriver) -> None:
        self._driver = driver
        self._begun = time.perf_counter()
        self._seen = (self._begun, 0)

    def answered(self, label: str, answer: LoadAnswer) -> None:
        if self.rows is not None:
            self.rows.writerow(csv_row(label, answer, self._begun))

    def level_ends(self, figures: LevelFigures) -> None:
        self._driver = None
        self._line.clear()
        if figures.sent():
            print_out("\n".join(level_lines(figures, self._objectives)))

    def verifying(self, done: int, total: int) -> None:
        if done == total:
            self._line.clear()
        elif self._line.live:
            self._line.show(f"comparing with the reference: {done} of {total}")

    async def watch(self) -> None:
        """Print a line of progress now and then; never ends."""
        while self._line.progress:
            await asyncio.sleep(TICK if self._line.live else SLOW_TICK)
            if self._driver is not None:
                self._line.show(self._status(self._driver))

    def _status(self, driver: LoadDriver) -> str:
        figures, now = driver.figures, time.perf_counter()
        since, before = self._seen
        self._seen = (now, driver.received)
        rate = (driver.received - before) / max(now - since, 1e-9)
        times = (f"{name} {_ms(figures.times[name.lower()].quantile(0.5))} ms" for name in LIVE)
        bad = sum(figures.ends[end] for end in ("refused", "late", "failed"))
        return (
            f"{figures.label}: {now - self._begun:.0f} s, {figures.open} open,"
            f" {figures.ends['done']:,} done, {bad:,} not, {rate:,.0f} tok/s, {', '.join(times)}"
        )


def level_lines(figures: LevelFigures, objectives: Objectives) -> Iterator[str]:
    """The table of one level."""
    seconds = figures.seconds or 1e-9
    loop = "open loop" if figures.is_open else "closed loop"
    yield paint(f"{figures.label} ({loop}), {figures.seconds:.1f} s", "bold")
    ends = ", ".join(f"{count:,} {name}" for name, count in figures.ends.items())
    yield f"  requests  {ends}; {figures.ends['done'] / seconds:.2f} done/s"
    prompt = figures.prompt_tokens / seconds
    yield f"  tokens    {figures.tokens / seconds:,.1f} output/s, {prompt:,.1f} prompt/s"
    if objectives.limits:
        limits = ", ".join(f"{name} {most:g} s" for name, most in objectives.limits.items())
        good = figures.good_tokens / seconds
        share = figures.good / figures.sent()
        yield f"  goodput   {share:.1%} of requests within {limits}; {good:,.1f} tokens/s"
    if figures.sources or figures.migrations is not None:
        yield f"  prompts   {_sources(figures)}"
    yield from _tenants(figures)
    if figures.retry_after.count:
        yield f"  refused   to ask again after {_seconds(figures.retry_after.quantile(0.5))} (p50)"
    yield table(("in ms", *PARTS), list(_latencies(figures)), frozenset(range(1, 6)))
    if (behind := figures.behind()) is not None:
        advice = "the latencies may be this generator's own; use several processes"
        yield from wrapped(f"the generator did not keep up: {behind}; {advice}", "yellow", "  ")
    for error, count in figures.errors.most_common(5):
        times = f"{count:,} x, such as:" if count > 1 and DECIMAL.search(error) else f"{count:,} x"
        yield from wrapped(f"{times} {error}", "yellow", "  ")


def closing_lines(levels: Sequence[LevelFigures], check: AnswerCheck) -> Iterator[str]:
    """The sweep, if there was one, and the verdict."""
    if len(levels) > 1:
        yield ""
        yield sweep_table(levels)
    yield from wrapped(verdict(check), "red" if check.failed else "green")
    for line in check.shown:
        yield from wrapped(line, "red", "  ")


def sweep_table(levels: Sequence[LevelFigures]) -> str:
    """A row for each level."""
    peak = peak_of(levels)
    rows = []
    for one in levels:
        seconds, times = one.seconds or 1e-9, seconds_of(one)
        good = one.good_tokens / seconds
        rows.append(
            (
                one.label if len(one.label) <= 24 else f"{one.label[:22]}..",
                f"{one.sent():,}",
                *(f"{one.ends[end]:,}" for end in ("refused", "late")),
                f"{good:,.0f}",
                f"{good / peak:.0%}" if peak else "-",
                *(_ms(times["ttft"].get(part)) for part in ("p50", "p99")),
                _ms(times["itl"].get("p99")),
                _ms(times["e2e"].get("p99")),
            )
        )
    head = ("load", "sent", "ref.", "late", "good/s", "peak", "TTFT", "p99", "ITL99", "e2e99")
    return table(head, rows, frozenset(range(1, len(head))))


def _latencies(figures: LevelFigures) -> Iterator[tuple[str, ...]]:
    named = dict(LATENCIES)
    for name, times in seconds_of(figures).items():
        if times["mean"] is not None:
            yield (named[name], *_cells(times))
    if figures.is_open:
        for name, due in figures.due_times.items():
            if due.count:
                yield (f"{named[name]}, from due", *_cells(due.summary()))


def _cells(times: Mapping[str, float | None]) -> tuple[str, ...]:
    return tuple(_ms(times.get(part)) for part in PARTS)


def _sources(figures: LevelFigures) -> str:
    total = sum(figures.sources.values()) or 1
    parts = [f"{count / total:.1%} {name}" for name, count in figures.sources.items()]
    if figures.migrations is not None:
        parts.append(f"{figures.migrations:,} migrations")
    return ", ".join(parts)


def _tenants(figures: LevelFigures) -> Iterator[str]:
    total = sum(figures.tenants.values())
    if len(figures.tenants) > 1 and total:
        parts = (f"{name} {count / total:.1%}" for name, count in figures.tenants.most_common(8))
        yield f"  tenants   {', '.join(parts)} of output tokens"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:,.2f}" if seconds < 0.01 else f"{seconds * 1e3:,.0f}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"
