"""From the engine's thread to the event loop: one queue of updates for each leg under way."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress

from kvrelay.engine.core.legs import StopChecker
from kvrelay.engine.core.request import Order
from kvrelay.engine.core.updates import Ended, Failed, Token, Update
from kvrelay.engine.engine import Engine
from kvrelay.errors import Draining
from kvrelay.rpc.deadline import Deadline
from kvrelay.sampling import Sampling

LegUpdates = list[Token | Ended]
LAST_SECONDS = 2.0  # of a deadline: for the legs that are handed back, and for the answer


class LegStreams:
    """The legs of one worker. All methods but ``deliver`` are for the event loop's thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[str, asyncio.Queue[Update]] = {}
        self._ids = itertools.count(1)
        self._idle = asyncio.Event()
        self._idle.set()
        self._leaving = False  # for good
        self._emptying = False  # for a while

    def attach(self) -> None:
        """Deliver into the running loop from now on."""
        self._loop = asyncio.get_running_loop()

    @property
    def open(self) -> int:
        """How many legs are under way."""
        return len(self._queues)

    @property
    def draining(self) -> bool:
        """Whether new legs are turned away."""
        return self._leaving or self._emptying

    def deliver(self, updates: Sequence[tuple[str, Update]]) -> None:
        """Called by the engine, once a step."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._dispatch, updates)

    def _dispatch(self, updates: Sequence[tuple[str, Update]]) -> None:
        for leg_id, update in updates:
            queue = self._queues.get(leg_id)
            if queue is not None:  # else: its client has left
                queue.put_nowait(update)

    def new_id(self, request_id: str) -> str:
        """An id of this stay of the request on this worker."""
        return f"{request_id}/{next(self._ids)}"

    @asynccontextmanager
    async def run(
        self, engine: Engine, order: Order, sampling: Sampling, stop_text: StopChecker | None
    ) -> AsyncGenerator[AsyncGenerator[LegUpdates]]:
        """Submit an order; its updates as they come. Leaving early aborts it in the engine."""
        if self.draining:
            raise Draining("this worker is draining: ask another one")
        queue: asyncio.Queue[Update] = asyncio.Queue()
        self._queues[order.request_id] = queue
        self._idle.clear()
        try:
            engine.submit(order, sampling, stop_text)
            async with aclosing(_batches(queue)) as batches:
                yield batches
        finally:
            del self._queues[order.request_id]
            engine.abort(order.request_id)  # without effect on one that has ended
            if not self._queues:
                self._idle.set()

    async def drain(self, deadline: Deadline) -> None:
        """Turn new legs away and wait for the last one to end.

        A router that sees this moves the streams it can. What is left when most of the time is
        over ends ``Draining`` after its last whole step, to be resumed from there.
        """
        self._leaving = True
        with suppress(TimeoutError):
            async with asyncio.timeout(_most_of(deadline)):
                await self._idle.wait()
        for queue in self._queues.values():
            queue.put_nowait(Failed(Draining("this worker is draining: go on elsewhere")))
        async with asyncio.timeout(deadline.remaining()):
            await self._idle.wait()

    @asynccontextmanager
    async def emptied(self, deadline: Deadline) -> AsyncGenerator[None]:
        """Turn new legs away for a while: inside of it no leg is here.

        Nothing makes this worker go, so a leg that no router moves ends where it is, or
        ``TimeoutError`` is raised and all is as before. ``Draining`` for one that leaves.
        """
        self._emptying = True
        try:
            async with asyncio.timeout(_most_of(deadline)):
                await self._idle.wait()
            if self._leaving:
                raise Draining("this worker is leaving")
            yield
        finally:
            self._emptying = False


def _most_of(deadline: Deadline) -> float:
    """Seconds of it, without the last ones."""
    remaining = deadline.remaining()
    return remaining - min(LAST_SECONDS, remaining / 4)


async def _batches(queue: asyncio.Queue[Update]) -> AsyncGenerator[LegUpdates]:
    """Everything that is there at a time, until the account of the leg has come."""
    while True:
        updates = [await queue.get()]
        while not queue.empty():
            updates.append(queue.get_nowait())
        batch: LegUpdates = []
        for update in updates:
            if isinstance(update, Failed):
                if batch:
                    yield batch  # tokens that were made before it failed
                raise update.error
            batch.append(update)
        yield batch
        if isinstance(batch[-1], Ended):
            return
