"""Watches one worker: asks it on an interval, and says what became of it.

Every check asks ``GetLoad``, whose boot token shows a restart between two checks; every few of them
``grpc.health.v1`` and ``GetInfo`` too. A worker is silent when no answer, and no token of any leg,
came for the time allowed. That time is counted in turns of this process's own loop: while the
router itself does not run, nobody is suspected. A worker that answers slowly, because it is busy,
is given more time: to take its work away would make others slow. So is one to which a long prompt
is under way: on a slow network the question waits behind it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass

import grpc

from kvrelay.errors import DeadlineExceeded, KvrelayError, Mismatch, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.health import is_serving
from kvrelay.rpc.protocol import SERVICES
from kvrelay.rpc.status import checked_response, from_rpc_error
from kvrelay.v1 import worker_pb2
from router.workers.health import WorkerHealth, of_answer, of_failure
from router.workers.worker import KnownWorker

TURNS = 8
WHOLE_EVERY = 4  # checks; the others only ask for the load
LONGEST_CHECK_SECONDS = 10.0
PATIENCE = 3.0  # times the slowest of its last answers
MOST_PATIENCE = 6.0  # times the silence configured
FORGET = 0.8  # of how slow it was, with each answer


@dataclass(frozen=True, slots=True)
class CheckIntervals:
    """Seconds: between two checks, of silence that makes suspect, of silence that makes gone."""

    interval: float
    silence: float
    gone_after: float


class Watcher:
    """``accept`` raises for a worker that may not join; ``judge`` is told each verdict."""

    def __init__(
        self,
        worker: KnownWorker,
        pace: CheckIntervals,
        accept: Callable[[KnownWorker, worker_pb2.WorkerInfo], None],
        judge: Callable[[KnownWorker, WorkerHealth], None],
        restarted: Callable[[KnownWorker, worker_pb2.WorkerInfo], None],
    ) -> None:
        self._worker = worker
        self._pace = pace
        self._accept = accept
        self._judge = judge
        self._restarted = restarted
        self._hurry = asyncio.Event()
        self._answered = time.monotonic()
        self._known = False
        self._checks = 0
        self._slowest = 0.0

    @property
    def silence(self) -> float:
        """Seconds that this worker may take now."""
        configured = self._pace.silence
        patience = min(max(configured, PATIENCE * self._slowest), MOST_PATIENCE * configured)
        return patience + self._worker.transit

    def hurry(self) -> None:
        """Check now."""
        self._hurry.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._hurry.clear()
            self._judge(self._worker, await self._verdict())
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pace.interval):
                    await self._hurry.wait()

    async def _verdict(self) -> WorkerHealth:
        begun = time.monotonic()
        try:
            verdict = await self._within(self._check())
        except KvrelayError as error:
            self._checks = 0  # whoever comes back is asked everything
            self._known &= not isinstance(error, Mismatch)
            if isinstance(error, DeadlineExceeded):
                self._slowest = max(self._slowest, time.monotonic() - begun)
            silent_for = time.monotonic() - self._answered
            return of_failure(error, self._known, silent_for, self._pace.gone_after)
        self._answered = time.monotonic()
        self._known = True
        self._worker.asked = begun
        self._slowest = max(self._answered - begun, FORGET * self._slowest)
        return verdict

    async def _within(self, check: Coroutine[None, None, WorkerHealth]) -> WorkerHealth:
        """The verdict of a check, or ``DeadlineExceeded`` once the worker is silent."""
        task = asyncio.ensure_future(check)
        silence, begun, turns = self.silence, time.monotonic(), 0
        try:
            while turns < TURNS:
                done, _ = await asyncio.wait((task,), timeout=silence / TURNS)
                if task.cancelled():  # by gRPC: a watcher must outlive that
                    raise Unavailable("the check was cancelled")
                if done:
                    return task.result()
                turns += 1
                if self._worker.heard > begun:  # busy, not silent
                    begun, turns = time.monotonic(), 0
        finally:
            task.cancel()
        raise DeadlineExceeded(f"it was silent for {silence:.2g} s")

    async def _check(self) -> WorkerHealth:
        worker = self._worker
        deadline = Deadline.after(LONGEST_CHECK_SECONDS + worker.transit)
        whole, serving = self._checks % WHOLE_EVERY == 0, True
        try:
            answer = await worker.control.GetLoad(
                worker_pb2.GetLoadRequest(), timeout=deadline.remaining()
            )
            load = checked_response(answer, worker.address).load
            if whole or load.worker_id != worker.key:
                await self._meet(deadline)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        if whole:
            serving = await is_serving(worker.channel, deadline, SERVICES[worker.role])
        worker.load = load
        self._checks += 1
        return of_answer(serving, load.draining)

    async def _meet(self, deadline: Deadline) -> None:
        """Learn who it is; one with another boot token has none of the legs of the one before."""
        worker = self._worker
        request = worker_pb2.GetInfoRequest()
        answer = await worker.control.GetInfo(request, timeout=deadline.remaining())
        info = checked_response(answer, worker.address).info
        before = worker.info
        worker.info = info
        if before is not None and before.worker_id != info.worker_id:
            self._restarted(worker, before)
        self._accept(worker, info)
