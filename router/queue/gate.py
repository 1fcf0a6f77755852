"""Where requests wait for their turn: the pure admission fed with time, workers and cancellations.

A request that leaves, for whatever reason, leaves at once: its place in the queue, or its slot.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrelay.errors import DeadlineExceeded, Exhausted
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.security.identity import Tenant
from kvrelay.v1 import router_pb2, types_pb2
from router.config import RouterConfig
from router.queue.admission import AdmissionControl, AdmissionStep
from router.queue.fair import QueuedRequest
from router.queue.tokenize_slots import TokenizeSlots
from router.workers.registry import Registry
from router.workers.worker import KnownWorker

log = logging.getLogger("kvrelay.router")
PATIENCE = 2.0  # times the longest wait expected
FREE = 8  # a pool is full when less than such a part of it is free
MORE = 1.25  # requests under way for each that decode workers run: some are in prefill
UNDER_WAY = 0.75  # of all requests that may be here: who waits must have a place, to have a right


class QueueGate:
    """One for a router."""

    def __init__(self, registry: Registry, config: RouterConfig) -> None:
        self._registry = registry
        self._admission = AdmissionControl(config.queue_tokens, config.queue_seconds)
        self._turns: dict[int, asyncio.Future[None]] = {}
        self._keys = itertools.count()
        self._queue_seconds = config.queue_seconds
        self._warned = False
        self._most = max(1, int(UNDER_WAY * config.max_requests))
        registry.listen(self._resize)

    @asynccontextmanager
    async def passed(
        self, tokens: int, priority: int, tenant: Tenant, deadline: Deadline, part: float = 1.0
    ) -> AsyncIterator[None]:
        """Inside of it the request is under way.

        ``Exhausted`` when it may not wait, or was pushed out; ``DeadlineExceeded`` when it has
        waited in vain.
        """
        self._resize()
        key, turn = next(self._keys), asyncio.get_running_loop().create_future()
        until, patience = deadline.at, deadline.remaining()
        one = QueuedRequest(
            key, tokens, tenant.name, tenant.weight, priority, until, part, patience
        )
        step, whole = self._admission.offer(one, time.monotonic()), False
        self._turns[key] = turn
        try:
            self._apply(step)
            await self._turn(one, turn, deadline)
            yield
            whole = True
        finally:
            del self._turns[key]
            if not turn.cancel() and not turn.cancelled():
                turn.exception()  # seen, also by who left as it came
            self._apply(self._admission.leave(key, time.monotonic(), whole))
            self._resize()

    def make_room(self, tenant: Tenant, turns: TokenizeSlots, count: int) -> None:
        """There are ``count`` requests, here and before in ``turns``: push out one that waits, of
        another tenant that has more of them, or raise ``Exhausted``."""
        admission, now = self._admission, time.monotonic()

        def pushed_out(other: Tenant) -> Exhausted:
            return admission.pushed_out(other.name, other.weight, now)

        if turns.crowd > admission.crowd and turns.crowd_out(tenant, pushed_out):
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

    async def _turn(
        self, one: QueuedRequest, turn: asyncio.Future[None], deadline: Deadline
    ) -> None:
        waiting = deadline.earlier(PATIENCE * self._queue_seconds)
        try:
            async with asyncio.timeout(waiting.remaining()):
                await turn
        except TimeoutError as error:
            if deadline.expired:
                raise DeadlineExceeded("its time was over while it waited for its turn") from error
            raise self._admission.missed(one, time.monotonic()) from error

    def _resize(self) -> None:
        """As many slots as there are workers for; as before while there are none."""
        usable = self._registry.usable(types_pb2.ROLE_DECODE)
        admission, halted = self._admission, not usable
        runs = math.ceil(MORE * sum(_runs(worker) for worker in usable))
        slots = min(runs, self._most) or admission.slots or 1
        if runs > self._most and not self._warned:
            self._warned = True
            log.warning("workers run %d requests, %d go: raise --max-requests", runs, self._most)
        if (slots, halted) != (admission.slots, admission.halted):
            self._apply(admission.resize(slots, time.monotonic(), halted))

    def _apply(self, step: AdmissionStep) -> None:
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
