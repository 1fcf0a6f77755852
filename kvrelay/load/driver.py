"""Sends requests in a closed or an open loop and measures their answers.

In an open loop a request has a moment at which it is due. Its latency is taken from there and from
when it was sent: a generator that falls behind does not hide what users would have waited.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass

from kvrelay.errors import DeadlineExceeded, Exhausted, KvrelayError
from kvrelay.load.draws import Arrivals
from kvrelay.load.figures import LevelFigures
from kvrelay.load.request import LoadAnswer, LoadDoor, LoadRequest, Part
from kvrelay.load.workload import Dialogue, Workload

TICK = 0.02  # seconds between two looks at how late the event loop is
FAILED_SECONDS = 0.1
MOST_SECONDS = 1.0
"""How long a user of a closed loop waits after a failure or refusal before the next request."""

clock = time.perf_counter


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLevel:
    """One load: closed with ``concurrency``, open with ``arrivals``, a trace with ``speed``.

    It ends after ``seconds``, ``requests`` or with its trace; requests that are open then are
    waited for. ``most_open``: the open loop sends no more than so many at once.
    """

    label: str
    concurrency: int | None = None
    arrivals: Arrivals | None = None
    speed: float | None = None
    seconds: float | None = None
    requests: int | None = None
    most_open: int = 4096

    @property
    def is_open(self) -> bool:
        return self.concurrency is None


@dataclass(slots=True)
class LoadDriver:
    """One level being driven. ``on_answer`` is called with every answer that has ended."""

    door: LoadDoor
    workload: Workload
    level: LoadLevel
    figures: LevelFigures
    timeout: float
    on_answer: Callable[[LoadAnswer], None]
    begin: int = 0
    received: int = 0  # tokens so far
    begun_requests: int = 0
    begun_dialogues: int = 0

    async def run(self) -> None:
        """Drive the level to its end. Cancelling it ends the open requests."""
        self.figures.begun = clock()
        spent = time.process_time()
        dialogues = self.workload.dialogues(self.begin)
        try:
            async with in_background(self._watch_loop()), asyncio.TaskGroup() as group:
                if self.level.concurrency is None:
                    await self._arrive(group, dialogues)
                for _ in range(self.level.concurrency or 0):
                    group.create_task(self._user(dialogues))
        finally:
            self.figures.seconds = clock() - self.figures.begun
            self.figures.busy = (time.process_time() - spent) / self.figures.seconds

    async def _user(self, dialogues: Iterator[Dialogue]) -> None:
        """One user: a conversation after the other."""
        while self._goes_on() and (dialogue := next(dialogues, None)) is not None:
            self._count_dialogue()
            await self._converse(dialogue, None)

    def _count_dialogue(self) -> None:
        self.begun_requests += 1
        self.begun_dialogues += 1

    async def _arrive(self, group: asyncio.TaskGroup, dialogues: Iterator[Dialogue]) -> None:
        places = asyncio.Semaphore(self.level.most_open)
        for dialogue, after in self._schedule(dialogues):
            due = self.figures.begun + after
            if self.level.seconds is not None and after >= self.level.seconds:
                await _until(self.figures.begun + self.level.seconds)
                return
            await _until(due)
            await places.acquire()
            if not self._goes_on():
                return
            self._count_dialogue()
            task = group.create_task(self._converse(dialogue, due))
            task.add_done_callback(lambda _: places.release())
            await asyncio.sleep(0)  # it begins now, also if the next one is due already

    def _schedule(self, dialogues: Iterator[Dialogue]) -> Iterator[tuple[Dialogue, float]]:
        """Each conversation and when it begins, in seconds from the start."""
        level = self.level
        if level.arrivals is not None:
            chance = random.Random(f"{self.workload.seed}:arrivals:{self.begin}")
            yield from zip(dialogues, level.arrivals.times(chance), strict=False)
        else:
            for dialogue in dialogues:
                yield dialogue, (dialogue.at or 0.0) / (level.speed or 1.0)

    def _goes_on(self) -> bool:
        level, past = self.level, clock() - self.figures.begun
        if level.requests is not None and self.begun_requests >= level.requests:
            return False
        if level.is_open:
            return True  # what was due before the end is sent, however late
        return level.seconds is None or past < level.seconds

    async def _converse(self, dialogue: Dialogue, due: float | None) -> None:
        """The turns of a conversation; it ends with the first answer that does not."""
        history: list[Part] = []
        for turn, spoken in enumerate(dialogue.turns):
            if turn and not self._goes_on():
                return
            if turn:
                self.begun_requests += 1
                due = clock() + spoken.think
                await _until(due)
            answer = await self._perform(dialogue.request(turn, history), due)
            if answer.ended != "done":
                if not self.level.is_open and answer.ended != "left":
                    await asyncio.sleep(min(answer.retry_after or FAILED_SECONDS, MOST_SECONDS))
                return
            history += (spoken.said, answer.content())

    async def _perform(self, request: LoadRequest, due: float | None) -> LoadAnswer:
        figures = self.figures
        figures.open += 1
        try:
            answer = await perform(self.door, request, self.timeout, due, self._count)
        finally:
            figures.open -= 1
        figures.add(answer)
        self.on_answer(answer)
        return answer

    def _count(self, tokens: int) -> None:
        self.received += tokens

    async def _watch_loop(self) -> None:
        """How late this process is: every time it takes is late by so much at most."""
        while True:
            due = clock() + TICK
            await asyncio.sleep(TICK)
            self.figures.loop_delay.add(max(0.0, clock() - due))


async def perform(
    door: LoadDoor,
    request: LoadRequest,
    timeout: float,  # noqa: ASYNC109 - it is a result, not an error
    due: float | None = None,
    count: Callable[[int], None] = lambda tokens: None,
) -> LoadAnswer:
    """One request and what became of it; nothing is raised for a failure of the server."""
    sent = clock()
    answer = LoadAnswer(request, sent if due is None else due, sent)
    try:
        async with asyncio.timeout(timeout), aclosing(door.ask(request, timeout)) as pieces:
            async for piece in pieces:
                before = answer.tokens
                answer.take(piece)
                count(max(0, answer.tokens - before))
                if request.leave_after is not None and answer.tokens >= request.leave_after:
                    answer.ended = "left"
                    return answer
                if request.read_rate is not None and answer.tokens > before:
                    await asyncio.sleep((answer.tokens - before) / request.read_rate)
    except Exhausted as error:
        answer.ended = "refused"
        answer.error = str(error)
        answer.retry_after = error.retry_after
    except (DeadlineExceeded, TimeoutError) as error:
        answer.ended = "late"
        answer.error = str(error) or f"no whole answer within {timeout:g} s"
    except (KvrelayError, OSError) as error:
        answer.error = str(error) or type(error).__name__
    else:
        answer.ended = "done" if answer.finish is not None else "failed"
        answer.error = "" if answer.finish is not None else "the answer has no finish reason"
    return answer


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - clock()))


@asynccontextmanager
async def in_background(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run an endless task in the background of the block, and cancel it at the end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
