"""Where requests wait for their turn: the pure admission fed with time, workers and cancellations.

A request that leaves, for whatever reason, leaves at once: its place in the queue, or its slot.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.errors import DeadlineExceeded
from protos import router_pb2, types_pb2
from router.admission import Admission, Step
from router.config import RouterConfig
from router.fair import Waiting
from router.registry import Registry
from router.turns import Turns
from router.worker import KnownWorker
from rpc.deadline import Deadline
from rpc.identity import Tenant

PATIENCE = 2.0  # times the longest wait expected
FREE = 8  # a pool is full when less than such a part of it is free
MORE = 1.25  # requests under way for each that decode workers run: some are in prefill


class Gate:
    """One for a router."""

    def __init__(self, registry: Registry, config: RouterConfig) -> None:
        self._registry = registry
        self._admission = Admission(config.queue_tokens, config.queue_seconds)
        self._turns: dict[int, asyncio.Future[None]] = {}
        self._keys = itertools.count()
        self._queue_seconds = config.queue_seconds
        registry.listen(self._resize)

    @asynccontextmanager
    async def passed(
        self, tokens: int, priority: int, tenant: Tenant, deadline: Deadline
    ) -> AsyncIterator[None]:
        """Inside of it the request is under way.

        ``Exhausted`` when it may not wait, or was pushed out; ``DeadlineExceeded`` when it has
        waited in vain.
        """
        self._resize()
        key, turn = next(self._keys), asyncio.get_running_loop().create_future()
        one = Waiting(key, tokens, tenant.name, tenant.weight, priority)
        step = self._admission.offer(one, time.monotonic(), deadline.remaining())
        self._turns[key] = turn
        try:
            self._apply(step)
            await self._turn(turn, deadline)
            yield
        finally:
            del self._turns[key]
            turn.cancel()
            self._apply(self._admission.leave(key, time.monotonic()))
            self._resize()

    def make_room(self, tenant: Tenant, turns: Turns, count: int) -> None:
        """There are ``count`` requests, here and before in ``turns``: push out one that waits, of
        another tenant that has more of them, or raise ``Exhausted``."""
        admission, now = self._admission, time.monotonic()
        if turns.crowd > admission.crowd and turns.crowd_out(
            tenant, lambda: admission.pushed_out(now)
        ):
            return
        self._apply(admission.crowd_out(tenant.name, tenant.weight, count, now))

    @property
    def refused(self) -> Counter[str]:
        """How many, by reason."""
        return self._admission.refused

    def status(self, refused: int) -> router_pb2.QueueStatus:
        """For ``ListWorkers``."""
        admission = self._admission
        return router_pb2.QueueStatus(
            running=admission.running,
            slots=admission.slots,
            waiting=admission.waiting,
            waiting_tokens=admission.waiting_tokens,
            tokens_per_second=admission.rate or 0.0,
            refused=refused,
        )

    async def _turn(self, turn: asyncio.Future[None], deadline: Deadline) -> None:
        waiting = deadline.earlier(PATIENCE * self._queue_seconds)
        try:
            await asyncio.wait_for(turn, waiting.remaining())
        except TimeoutError as error:
            if deadline.expired:
                raise DeadlineExceeded("its time was over while it waited for its turn") from error
            raise self._admission.missed(time.monotonic()) from error

    def _resize(self) -> None:
        """As many slots as there are workers for; as before while there are none."""
        usable = self._registry.usable(types_pb2.ROLE_DECODE)
        admission, halted = self._admission, not usable
        slots = math.ceil(MORE * sum(_runs(worker) for worker in usable)) or admission.slots or 1
        if (slots, halted) != (admission.slots, admission.halted):
            self._apply(admission.resize(slots, time.monotonic(), halted))

    def _apply(self, step: Step) -> None:
        for key in step.go:
            if not self._turns[key].done():
                self._turns[key].set_result(None)
        for key, error in step.refused:
            if not self._turns[key].done():
                self._turns[key].set_exception(error)


def _runs(worker: KnownWorker) -> int:
    """Requests that it runs at once: fewer than it may where they fill its pool."""
    load, info = worker.load, worker.info
    if info is None:
        return 0
    full = load.waiting and load.free_blocks * FREE < info.num_blocks
    return min(max(load.running, 1), info.max_num_seqs) if full else info.max_num_seqs
