"""Carries updates from the engine's thread to the event loop: one queue for each open leg."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress

from kvrelay.engine.core.legs import StopChecker
from kvrelay.engine.core.request import Order
from kvrelay.engine.core.updates import (
    Admitted,
    Ended,
    Failed,
    LegTrace,
    OutputGrammar,
    Token,
    Update,
)
from kvrelay.errors import Draining
from kvrelay.rpc.deadline import Deadline
from kvrelay.sampling import Sampling
from kvrelay.worker.engines.opened import WorkerEngine

LegUpdates = list[Admitted | Token | Ended]
LAST_SECONDS = 2.0  # of a deadline, reserved to end the remaining legs and to answer


class LegStreams:
    """The open legs of one worker. All methods but ``deliver`` run on the event loop's thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[str, asyncio.Queue[Update]] = {}
        self._ids = itertools.count(1)
        self._idle = asyncio.Event()
        self._idle.set()
        self._leaving = False
        self._emptying = False

    def attach(self) -> None:
        """Deliver into the running event loop."""
        self._loop = asyncio.get_running_loop()

    @property
    def open(self) -> int:
        """The number of open legs."""
        return len(self._queues)

    @property
    def draining(self) -> bool:
        """Whether new legs are refused."""
        return self._leaving or self._emptying

    def deliver(self, updates: Sequence[tuple[str, Update]]) -> None:
        """Hand over the updates of a step; the engine's thread calls it."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._dispatch, updates)

    def _dispatch(self, updates: Sequence[tuple[str, Update]]) -> None:
        for leg_id, update in updates:
            queue = self._queues.get(leg_id)
            if queue is not None:  # None: the client has left
                queue.put_nowait(update)

    def new_id(self, request_id: str) -> str:
        """A new id for a leg of the request on this worker."""
        return f"{request_id}/{next(self._ids)}"

    @asynccontextmanager
    async def run(
        self,
        engine: WorkerEngine,
        order: Order,
        sampling: Sampling,
        stop_checker: StopChecker | None,
        grammar: OutputGrammar | None = None,
        trace: LegTrace | None = None,
    ) -> AsyncGenerator[AsyncGenerator[LegUpdates]]:
        """Submit an order and yield its updates. Leaving the context early aborts the leg."""
        if self.draining:
            raise Draining("this worker is draining: use another one")
        queue: asyncio.Queue[Update] = asyncio.Queue()
        self._queues[order.request_id] = queue
        self._idle.clear()
        try:
            engine.submit(order, sampling, stop_checker, grammar, trace)
            async with aclosing(_batches(queue)) as batches:
                yield batches
        finally:
            del self._queues[order.request_id]
            engine.abort(order.request_id)  # no effect if it has ended
            if not self._queues:
                self._idle.set()

    async def drain(self, deadline: Deadline) -> None:
        """Refuse new legs for good and wait until the last one has ended.

        A router that sees this moves its streams. Legs that are still open when most of the time
        has passed end with ``Draining`` after their last whole step, to be resumed elsewhere.
        """
        self._leaving = True
        with suppress(TimeoutError):
            async with asyncio.timeout(_most_of(deadline)):
                await self._idle.wait()
        for queue in self._queues.values():
            queue.put_nowait(Failed(Draining("this worker is draining: resume elsewhere")))
        async with asyncio.timeout(deadline.remaining()):
            await self._idle.wait()

    @asynccontextmanager
    async def emptied(self, deadline: Deadline) -> AsyncGenerator[None]:
        """Refuse new legs; no leg is open inside the context.

        No leg is ended: raises ``TimeoutError`` if legs are still open when most of the time has
        passed, and ``Draining`` if the worker is shutting down.
        """
        self._emptying = True
        try:
            async with asyncio.timeout(_most_of(deadline)):
                await self._idle.wait()
            if self._leaving:
                raise Draining("this worker is shutting down")
            yield
        finally:
            self._emptying = False


def _most_of(deadline: Deadline) -> float:
    """The seconds that remain, less those kept for the end."""
    remaining = deadline.remaining()
    return remaining - min(LAST_SECONDS, remaining / 4)


async def _batches(queue: asyncio.Queue[Update]) -> AsyncGenerator[LegUpdates]:
    """The updates of a leg, each time all that are queued, up to its account."""
    while True:
        updates = [await queue.get()]
        while not queue.empty():
            updates.append(queue.get_nowait())
        batch: LegUpdates = []
        for update in updates:
            if isinstance(update, Failed):
                if batch:
                    yield batch  # tokens generated before the failure
                raise update.error
            batch.append(update)
        yield batch
        if isinstance(batch[-1], Ended):
            return
