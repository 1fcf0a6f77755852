"""Watches one worker: checks it on an interval and reports its health.

Every check calls ``GetLoad``, whose boot token shows a restart between two checks; every fourth
one, and each one of a worker that is NOT_SERVING, also calls ``grpc.health.v1`` and ``GetInfo``. A
worker is silent if neither an answer to a check nor a message of a leg arrives within the time
allowed. That time is counted in waits of the router's own event loop: while the router does not
run, no worker becomes suspect. If a check's deadline passes while the router stands still, the
router makes the check again. A slow worker and a busy host get more time (``Patience``). So does a
worker that is being sent a long prompt: on a slow network the check waits behind the prompt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvrelay.errors import DeadlineExceeded, KvrelayError, Mismatch, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.v1 import worker_pb2
from router.config import RouterConfig
from router.workers.health import WorkerHealth, health_after_answer, health_after_failure
from router.workers.patience import Patience
from router.workers.worker import KnownWorker

WAITS = 8  # into which the time allowed is divided
FULL_CHECK_EVERY = 4  # checks; the others only read the load
LONGEST_CHECK_SECONDS = 10.0
STOOD_SECONDS = 1.0  # a wait that ends so late shows that the router itself stood still


def _unknown(error: Exception) -> Unavailable:
    return Unavailable(f"its answer cannot be read: {error!r:.200}")


class Watcher:
    """``accept`` raises for a worker that may not join; ``judge`` gets the health of each check.

    ``restarted`` gets the previous information of a worker whose boot token has changed.
    """

    def __init__(
        self,
        worker: KnownWorker,
        config: RouterConfig,
        accept: Callable[[KnownWorker, worker_pb2.WorkerInfo], None],
        judge: Callable[[KnownWorker, WorkerHealth], None],
        restarted: Callable[[KnownWorker, worker_pb2.WorkerInfo], None],
    ) -> None:
        self._worker = worker
        self._config = config
        self._accept = accept
        self._judge = judge
        self._restarted = restarted
        self._due = asyncio.Event()  # set: check now
        self._answered_at = time.monotonic()
        self._began = 0.0  # of the last check
        self._accepted = False
        self._serving = True  # as of the last full check
        self._checks = 0  # since the last one that failed
        self._patience = Patience(config.health_timeout)

    @property
    def silence(self) -> float:
        """Seconds that this worker may be silent now."""
        return self._patience.silence + self._worker.transit

    def check_now(self) -> None:
        """Do not wait for the end of the interval."""
        self._due.set()

    async def run(self) -> None:
        """Check the worker until cancelled."""
        while True:
            self._due.clear()
            self._judge(self._worker, await self._health())
            await self._pause()

    async def _pause(self) -> None:
        """Wait until the next check is due."""
        interval, begun = self._config.health_interval, time.monotonic()
        try:
            async with asyncio.timeout(interval):
                await self._due.wait()
        except TimeoutError:
            self._patience.woke(time.monotonic() - begun - interval, interval)

    async def _health(self) -> WorkerHealth:
        try:
            health = await self._within_silence()
        except Exception as found:  # noqa: BLE001 - the watcher goes on, whatever was answered
            error = found if isinstance(found, KvrelayError) else _unknown(found)
            self._checks = 0  # the next check is a full one
            self._accepted &= not isinstance(error, Mismatch)
            now = time.monotonic()
            if isinstance(error, DeadlineExceeded):
                self._patience.fell_silent(now - self._began)
            return health_after_failure(
                error,
                self._accepted,
                now - self._answered_at,
                self._config.unreachable_after,
            )
        self._answered_at = time.monotonic()
        self._accepted = True
        self._worker.answered_check = self._began
        self._patience.answered(self._answered_at - self._began)
        return health

    async def _within_silence(self) -> WorkerHealth:
        """The result of a check; ``DeadlineExceeded`` once the worker is silent."""
        silence, waits, stood = self.silence, 0, False
        task = self._begin_check()
        begun = self._began
        try:
            while waits < WAITS:
                asked = time.monotonic()
                done, _ = await asyncio.wait((task,), timeout=silence / WAITS)
                stood |= time.monotonic() - asked > silence / WAITS + STOOD_SECONDS
                if task.cancelled():  # by gRPC; the watcher continues
                    raise Unavailable("the check was cancelled")
                if done and stood and isinstance(task.exception(), DeadlineExceeded):
                    self._answered_at = time.monotonic()  # what passed was no silence
                    task = self._begin_check()
                    begun, waits, stood = self._began, 0, False
                    continue
                if done:
                    return task.result()
                waits += 1
                if self._worker.heard_at > begun:  # busy, not silent
                    begun, waits = time.monotonic(), 0
        finally:
            task.cancel()
        raise DeadlineExceeded(f"it was silent for {silence:.2g} s")

    def _begin_check(self) -> asyncio.Task[WorkerHealth]:
        self._began = time.monotonic()
        return asyncio.ensure_future(self._check())

    async def _check(self) -> WorkerHealth:
        worker = self._worker
        longest = max(LONGEST_CHECK_SECONDS + worker.transit, self.silence)
        deadline = Deadline.after(longest)
        full = self._checks % FULL_CHECK_EVERY == 0 or not self._serving
        load = await worker.link.load(deadline)
        if full or load.worker_id != worker.key:
            await self._update_info(deadline)
        if full:
            self._serving = await worker.link.serving(worker.role, deadline)
        worker.load = load
        self._checks += 1
        return health_after_answer(self._serving, load.draining)

    async def _update_info(self, deadline: Deadline) -> None:
        """Read the information; another boot token means that the worker has lost its legs."""
        worker = self._worker
        info = await worker.link.info(deadline)
        before = worker.info
        worker.info = info
        if before is not None and before.worker_id != info.worker_id:
            self._restarted(worker, before)
        self._accept(worker, info)
