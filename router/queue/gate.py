"""The gate in front of the workers: feeds the pure admission control with time and workers.

A request that ends or is cancelled gives up its place in the queue or its slot at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from kvrelay.errors import Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.security.identity import Tenant
from kvrelay.v1 import router_pb2, types_pb2
from router.config import RouterConfig, out_of_time
from router.queue.admission import AdmissionControl, AdmissionStep
from router.queue.fair import QueuedRequest
from router.queue.quotas import QuotaHold
from router.queue.semaphore import FairSemaphore
from router.workers.registry import Registry
from router.workers.worker import KnownWorker

log = logging.getLogger("kvrelay.router")
MAX_WAIT = 2.0  # times the longest wait expected
FULL = 8  # a pool is full if less than one part in so many is free
HEADROOM = 1.25  # running requests for each that decode workers run: some of them are in prefill
MAX_RUNNING = 0.75  # of all requests allowed: a fair choice needs waiting requests


@dataclass(slots=True)
class Slot:
    """The place of a running request, which ``waited`` seconds for it.

    The request sets ``moved`` once it has lost a worker.
    """

    waited: float = 0.0
    moved: bool = False


@dataclass(slots=True, eq=False)
class GateEntry:
    """A request in the gate; it counts as ``places`` of them."""

    tenant: Tenant
    places: int = 0


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """What an open request holds: of its tenant's quota, and of the router's places."""

    quota: QuotaHold
    entry: GateEntry


class QueueGate:
    """One for a router. A request is open from ``entered``, and runs inside ``passed``.

    ``semaphores``: what it may wait for in between. ``on_slot`` gets the seconds that each request
    with a slot has waited for it.
    """

    def __init__(
        self,
        registry: Registry,
        semaphores: Sequence[FairSemaphore],
        config: RouterConfig,
        on_slot: Callable[[float], object],
    ) -> None:
        self._registry = registry
        self._semaphores = semaphores
        self._on_slot = on_slot
        self._admission = AdmissionControl(config.queue_tokens, config.queue_seconds)
        self._grants: dict[int, asyncio.Future[None]] = {}
        self._keys = itertools.count()
        self._queue_seconds = config.queue_seconds
        self._max_open = config.max_requests
        self._max_running = max(1, int(MAX_RUNNING * config.max_requests))
        self._warned = False
        self._draining = False
        self._open = 0
        self._idle = asyncio.Event()  # set while no request is open
        self._idle.set()
        registry.listen(self._resize)

    @contextmanager
    def entered(self, tenant: Tenant) -> Iterator[GateEntry]:
        """Count a request as open inside.

        ``Unavailable`` while the router drains. If too many are open, a waiting request of a tenant
        with more of them is evicted for it; ``Exhausted`` if there is none.
        """
        entry = GateEntry(tenant)
        try:
            self.widen(entry, 1)
            yield entry
        finally:
            self._open -= entry.places
            if not self._open:
                self._idle.set()

    def widen(self, entry: GateEntry, places: int) -> None:
        """Count as so many requests from now on. Raises as ``entered`` does."""
        while entry.places < places:
            if self._draining:
                raise Unavailable("this router is draining: ask another one")
            if self._open >= self._max_open:
                self._make_room(entry.tenant)
            self._open += 1
            self._idle.clear()
            entry.places += 1

    def check_samples(self, samples: int, tokens: int) -> None:
        """As ``AdmissionControl.check_samples``."""
        if samples > 1:  # there is always a slot for one
            self._resize()
            self._admission.check_samples(samples, tokens)

    @property
    def draining(self) -> bool:
        """Whether new requests are refused for good."""
        return self._draining

    async def drain(self) -> None:
        """Refuse new requests and wait until the last open one has ended."""
        self._draining = True
        self._registry.ending = True
        await self._idle.wait()

    @asynccontextmanager
    async def passed(
        self,
        tokens: int,
        priority: int,
        tenant: Tenant,
        deadline: Deadline,
        part: float = 1.0,
        *,
        patient: bool = False,
    ) -> AsyncIterator[Slot]:
        """Wait for a slot; the request runs inside, with the slot.

        ``part``: as in ``QueuedRequest``.

        A ``patient`` request, once it may wait, waits until its deadline: its client has tokens.

        ``Exhausted`` if it may not wait, or was evicted; ``DeadlineExceeded`` if its slot did not
        come in time.
        """
        self._resize()
        request = QueuedRequest(
            key=next(self._keys),
            tokens=tokens,
            tenant=tenant.name,
            weight=tenant.weight,
            priority=priority,
            until=deadline.at,
            part=part,
            timeout=deadline.remaining(),
        )
        grant = asyncio.get_running_loop().create_future()
        begun, whole = time.monotonic(), False
        slot = Slot()
        step = self._admission.offer(request, begun)
        self._grants[request.key] = grant
        try:
            self._apply(step)
            await self._wait(request, grant, deadline, patient)
            slot.waited = time.monotonic() - begun
            self._on_slot(slot.waited)
            yield slot
            whole = True
        finally:
            del self._grants[request.key]
            if not grant.cancel() and not grant.cancelled():
                grant.exception()  # retrieved, also for a request that left at the same moment
            now = time.monotonic()
            self._apply(self._admission.leave(request.key, now, whole, slot.moved))
            self._resize()

    @property
    def refused(self) -> Counter[str]:
        """Number of requests refused, by reason."""
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

    def _make_room(self, tenant: Tenant) -> None:
        """Evict a request that waits to be read or tokenized, or one of the queue; or raise."""
        admission, now = self._admission, time.monotonic()
        fullest = max(self._semaphores, key=lambda semaphore: semaphore.max_load)
        if fullest.max_load > admission.max_load and fullest.evict_for(
            tenant, lambda other: admission.evicted(other.name, other.weight, now)
        ):
            return
        self._apply(admission.evict_for(tenant.name, tenant.weight, self._open, now))

    async def _wait(
        self,
        request: QueuedRequest,
        grant: asyncio.Future[None],
        deadline: Deadline,
        patient: bool,
    ) -> None:
        waiting = deadline if patient else deadline.earlier(MAX_WAIT * self._queue_seconds)
        try:
            async with asyncio.timeout(waiting.remaining()):
                await grant
        except TimeoutError as error:
            if deadline.expired:
                raise out_of_time("while it waited for a slot") from error
            raise self._admission.timed_out(request, time.monotonic()) from error

    def _resize(self) -> None:
        """As many slots as the workers can run; the number is kept while there are no workers."""
        usable = self._registry.usable(types_pb2.ROLE_DECODE)
        admission, halted = self._admission, not usable
        capacity = math.ceil(HEADROOM * sum(_capacity(worker) for worker in usable))
        slots = min(capacity, self._max_running) or admission.slots or 1
        if capacity > self._max_running and not self._warned:
            self._warned = True
            log.warning(
                "workers run %d requests, %d may run: raise --max-requests",
                capacity,
                self._max_running,
            )
        if (slots, halted) != (admission.slots, admission.halted):
            self._apply(admission.resize(slots, time.monotonic(), halted))

    def _apply(self, step: AdmissionStep) -> None:
        for key in step.started:
            if not self._grants[key].done():
                self._grants[key].set_result(None)
        for key, error in step.refused:
            if not self._grants[key].done():
                self._grants[key].set_exception(error)


def _capacity(worker: KnownWorker) -> int:
    """Requests that it runs at once: fewer than it may if these fill its pool."""
    load, info = worker.load, worker.info
    if info is None:
        return 0
    full = load.waiting and load.free_blocks * FULL < info.num_blocks
    return min(max(load.running, 1), info.max_num_seqs) if full else info.max_num_seqs
