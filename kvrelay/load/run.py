"""A whole run: warm up, drive one level after another, then verify the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvrelay.load.check import AnswerCheck
from kvrelay.load.draws import Arrivals
from kvrelay.load.driver import LoadDriver, LoadLevel, perform
from kvrelay.load.figures import LevelFigures, Objectives
from kvrelay.load.http_door import HttpDoor
from kvrelay.load.metrics_page import MetricsPage
from kvrelay.load.request import LoadAnswer, LoadDoor, LoadRequest
from kvrelay.load.workload import Workload

PAGE = "/metrics"


class LoadWatcher:
    """What a run tells while it goes on; the command prints it."""

    def level_begins(self, driver: LoadDriver) -> None:
        """Its figures grow until ``level_ends``."""

    def answered(self, label: str, answer: LoadAnswer) -> None:
        """An answer has ended."""

    def level_ends(self, figures: LevelFigures) -> None:
        """Also for a level that was interrupted."""

    def verifying(self, done: int, total: int) -> None:
        """So many answers were compared with the reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What to do. ``factors``: open levels at multiples of the rate of the first, closed level.

    ``ids_sent``: the prompts are token ids. ``check_concurrency``: requests to the reference at
    once.
    """

    workload: Workload
    levels: Sequence[LoadLevel]
    objectives: Objectives = field(default_factory=Objectives)
    timeout: float = 600.0
    warm_up: int = 0
    factors: Sequence[float] = ()
    ids_sent: bool = True
    check_concurrency: int = 1


@dataclass(slots=True)
class LoadRun:
    """A plan being carried out against ``door``; ``reference`` answers when the load is over."""

    plan: LoadPlan
    door: LoadDoor
    check: AnswerCheck
    watcher: LoadWatcher
    reference: LoadDoor | None = None
    levels: list[LevelFigures] = field(default_factory=list)
    _used: int = 0  # conversations of the levels so far

    async def run(self) -> None:
        """Until everything is done, or cancelled; ``levels`` and ``check`` have what was found."""
        if self.plan.warm_up:
            await self._warm_up()
        for level in self.plan.levels:
            await self._drive(level)
        if self.plan.factors:
            capacity = self.levels[-1].ends["done"] / self.levels[-1].seconds
            template = self.plan.levels[-1]
            for factor in self.plan.factors:
                await self._drive(_multiple(template, factor, capacity))
        if self.reference is not None:
            await self._verify(self.reference)

    async def _warm_up(self) -> None:
        count = self.plan.warm_up
        level = LoadLevel(label="warm up", concurrency=min(count, 4), requests=count)
        figures = LevelFigures(level.label, self.plan.objectives, 0.0, False)
        await self._driver(level, figures, lambda answer: None).run()
        self._used += count

    async def _drive(self, level: LoadLevel) -> None:
        figures = LevelFigures(level.label, self.plan.objectives, 0.0, level.is_open)
        self.levels.append(figures)

        def ended(answer: LoadAnswer) -> None:
            self.check.take(answer, self.plan.ids_sent)
            self.watcher.answered(level.label, answer)

        driver = self._driver(level, figures, ended)
        before = await self._page()
        self.watcher.level_begins(driver)
        try:
            await driver.run()
            after = await self._page()
            if before is not None and after is not None:
                figures.queue_page = after.queue_since(before)
                if figures.migrations is None:
                    figures.migrations = after.migrations_since(before)
        finally:
            self._used += driver.begun_dialogues
            self.watcher.level_ends(figures)

    def _driver(
        self, level: LoadLevel, figures: LevelFigures, ended: Callable[[LoadAnswer], None]
    ) -> LoadDriver:
        return LoadDriver(
            door=self.door,
            workload=self.plan.workload,
            level=level,
            figures=figures,
            timeout=self.plan.timeout,
            on_answer=ended,
            begin=self._used,
        )

    async def _page(self) -> MetricsPage | None:
        if not isinstance(self.door, HttpDoor):
            return None
        text = await self.door.page(PAGE)
        return None if text is None else MetricsPage(text)

    async def _verify(self, reference: LoadDoor) -> None:
        """Ask the reference, ``beside`` requests at once; its own server only where needed."""
        every = reference is not self.door
        pending = list(self.check.pending(every))
        done = 0

        async def user(left: Iterable[LoadRequest]) -> None:
            nonlocal done
            for request in left:
                alone = replace(request, leave_after=None, read_rate=None)
                self.check.verify(await perform(reference, alone, self.plan.timeout))
                done += 1
                self.watcher.verifying(done, len(pending))

        queue = iter(pending)
        async with asyncio.TaskGroup() as group:
            for _ in range(self.plan.check_concurrency):
                group.create_task(user(queue))


def _multiple(template: LoadLevel, factor: float, capacity: float) -> LoadLevel:
    rate = max(factor * capacity, 1e-3)
    return replace(
        template,
        label=f"{factor:g} x, {rate:.3g}/s",
        concurrency=None,
        arrivals=Arrivals(rate=rate),
    )
