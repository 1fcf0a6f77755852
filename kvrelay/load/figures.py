"""What was measured at one load: histograms, counts, goodput, and how it went over time."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvrelay.errors import Rejected
from kvrelay.load.request import LoadAnswer

STEP = math.log(1.01)
FLOOR = 1e-6  # seconds
MOST_PERIODS = 120
QUANTILES = (0.5, 0.9, 0.99)
ENDS = ("done", "refused", "late", "left", "failed")
OBJECTIVES = ("ttft", "itl", "e2e")
LATE = 0.02  # seconds; the generator does not keep up if 1% of its times are later
DECIMAL = re.compile(r"\d+\.\d+|\d+(?= s\b)")  # errors that differ in times only are one
MOST_ERRORS = 20  # different texts


class Durations:
    """A histogram of seconds with bins of 1%, so a quantile is within 0.5%; the mean is exact."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.max = 0.0
        self._bins = Counter[int]()

    def add(self, seconds: float) -> None:
        self.count += 1
        self.sum += seconds
        self.max = max(self.max, seconds)
        self._bins[round(math.log(max(seconds, FLOOR)) / STEP)] += 1

    def merge(self, other: Durations) -> None:
        self.count += other.count
        self.sum += other.sum
        self.max = max(self.max, other.max)
        self._bins.update(other._bins)

    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None

    def quantile(self, part: float) -> float | None:
        """The smallest bin that ``part`` of the values do not exceed; nearest rank."""
        left = max(1, math.ceil(part * self.count))
        for index in sorted(self._bins):
            left -= self._bins[index]
            if left <= 0:
                return min(math.exp(index * STEP), self.max)
        return None

    def summary(self) -> dict[str, float | None]:
        """For tables and JSON."""
        found = {"mean": self.mean()}
        found.update({f"p{part * 100:g}": self.quantile(part) for part in QUANTILES})
        return {**found, "max": self.max if self.count else None}


@dataclass(frozen=True, slots=True)
class Objectives:
    """Most seconds of ``ttft``, ``itl`` (the mean of a request) and ``e2e``; absent: no limit."""

    limits: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str | None) -> Objectives:
        """``ttft=0.5,itl=0.05``; ``Rejected`` if it is something else."""
        limits = {}
        for word in (text or "").split(","):
            name, _, value = word.strip().partition("=")
            if not word.strip():
                continue
            try:
                limits[name] = float(value)
            except ValueError:
                limits[name] = math.nan
            if name not in OBJECTIVES or not limits[name] > 0:
                wanted = " or ".join(f"{known}=SECONDS" for known in OBJECTIVES)
                raise Rejected("slo", f"{word!r}: wanted is {wanted}")
        return cls(limits)

    def met(self, answer: LoadAnswer) -> bool:
        """Whether an answer is done and in time, counted from when it was due."""
        if answer.ended != "done" or answer.first is None or answer.last is None:
            return False
        took = {"ttft": answer.first - answer.due, "e2e": answer.last - answer.due}
        took["itl"] = answer.token_gap() or 0.0
        return all(took[name] <= limit for name, limit in self.limits.items())


@dataclass(slots=True)
class Period:
    """Some seconds of a load."""

    ttft: Durations = field(default_factory=Durations)
    e2e: Durations = field(default_factory=Durations)
    tokens: int = 0

    def merge(self, other: Period) -> None:
        self.ttft.merge(other.ttft)
        self.e2e.merge(other.e2e)
        self.tokens += other.tokens


class Course:
    """Periods of equal length, at most ``MOST_PERIODS``: twice as long when there are too many."""

    def __init__(self) -> None:
        self.seconds = 0.5
        self._periods: dict[int, Period] = {}

    def at(self, time: float) -> Period:
        """The period that has the moment ``time``, in seconds from the start."""
        while time >= self.seconds * MOST_PERIODS:
            self._double()
        return self._periods.setdefault(max(0, int(time / self.seconds)), Period())

    def periods(self) -> Iterator[tuple[float, Period]]:
        """In order of time, each with the middle of its time."""
        for index in sorted(self._periods):
            yield (index + 0.5) * self.seconds, self._periods[index]

    def _double(self) -> None:
        self.seconds *= 2
        merged: dict[int, Period] = {}
        for index, period in self._periods.items():
            merged.setdefault(index // 2, Period()).merge(period)
        self._periods = merged


class LevelFigures:
    """Everything that is measured at one load. ``begun`` by ``time.perf_counter``.

    A client that reads slowly or leaves has no latencies here: they would be its own.
    """

    def __init__(self, label: str, objectives: Objectives, begun: float, is_open: bool) -> None:
        self.label = label
        self.begun = begun
        self.is_open = is_open
        self.seconds = 0.0
        self.busy = 0.0  # share of a core that this process used
        self.loop_delay = Durations()
        self.open = 0
        self.ends = Counter[str](dict.fromkeys(ENDS, 0))
        self.errors = Counter[str]()  # by the first text of each kind
        self.tokens = 0
        self.prompt_tokens = 0
        self.good = 0
        self.good_tokens = 0
        self.sources = Counter[str]()
        self.migrations: int | None = None
        self.tenants = Counter[str]()
        self.times = {name: Durations() for name in ("ttft", "itl", "e2e", "queue", "lateness")}
        self.due_times = {name: Durations() for name in ("ttft", "e2e")}
        self.retry_after = Durations()
        self.course = Course()
        self.queue_page: Mapping[str, float | None] | None = None  # of the server's metrics
        self._first_errors: dict[str, str] = {}  # by the text without its times
        self._objectives = objectives

    def add(self, answer: LoadAnswer) -> None:
        """Count an answer that has ended."""
        self.ends[answer.ended] += 1
        self.tenants[answer.request.tenant] += answer.tokens
        self.tokens += answer.tokens
        kind = DECIMAL.sub("N", answer.error)
        if kind and (kind in self._first_errors or len(self.errors) < MOST_ERRORS):
            self.errors[self._first_errors.setdefault(kind, answer.error)] += 1
        if answer.retry_after is not None:
            self.retry_after.add(answer.retry_after)
        if self._objectives.met(answer):
            self.good += 1
            self.good_tokens += answer.tokens
        self._add_account(answer)
        self._add_times(answer)

    def _add_account(self, answer: LoadAnswer) -> None:
        account = answer.account
        if account is None:
            return
        self.prompt_tokens += account.prompt_tokens
        self.sources.update(account.sources)
        if account.queue_seconds is not None:
            self.times["queue"].add(account.queue_seconds)
        if account.migrations is not None:
            self.migrations = (self.migrations or 0) + account.migrations

    def _add_times(self, answer: LoadAnswer) -> None:
        self.times["lateness"].add(answer.sent - answer.due)
        if answer.first is None or answer.last is None or answer.request.read_rate is not None:
            return
        ttft = answer.first - answer.sent
        self.times["ttft"].add(ttft)
        self.due_times["ttft"].add(answer.first - answer.due)
        for gap in answer.gaps:
            self.times["itl"].add(gap)
        period = self.course.at(answer.last - self.begun)
        period.ttft.add(ttft)
        period.tokens += answer.tokens
        if answer.ended == "done":
            self.times["e2e"].add(answer.last - answer.sent)
            self.due_times["e2e"].add(answer.last - answer.due)
            period.e2e.add(answer.last - answer.sent)

    def sent(self) -> int:
        """Requests that have ended."""
        return sum(self.ends.values())

    def behind(self) -> str | None:
        """Why the latencies may be this process's own, ``None`` if it kept up."""
        late, delay = self.times["lateness"].quantile(0.99), self.loop_delay.quantile(0.99)
        if self.is_open and late is not None and late > LATE:
            return f"1% of the requests were sent more than {late * 1e3:,.0f} ms late"
        if delay is not None and delay > LATE:
            return f"1% of the time stamps are more than {delay * 1e3:,.0f} ms late"
        return None
