"""A queue of jobs and the threads that run them.

Each job ends exactly once: it is run, or given up when the pool closes. It runs in the context of
its caller, so its calls belong to the caller's span.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Protocol

from kvrelay.rpc.deadline import Deadline

log = logging.getLogger(__name__)


class QueuedJob(Protocol):
    """Work whose end its owner waits for."""

    def run(self) -> None:
        """Do the work, and end it. Expected errors end it as failed and are not raised."""

    def give_up(self) -> None:
        """End it as failed, without trying."""


class ThreadPool:
    """First in, first out, over ``threads`` daemon threads; ``crashed`` is called if a job raises.

    `concurrent.futures` would wait for its threads at exit and cannot end waiting jobs as failed.
    """

    def __init__(self, name: str, threads: int, crashed: Callable[[], None]) -> None:
        self._jobs: deque[tuple[QueuedJob, Context]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._crashed = crashed
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True)
            for n in range(threads)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, job: QueuedJob) -> None:
        """Queue a job. Once the pool is closed, the job is given up at once."""
        with self._wake:
            if not self._closed:
                self._jobs.append((job, copy_context()))
                self._wake.notify()
                return
        job.give_up()

    def close(self) -> None:
        """Give up the jobs that wait. Jobs that run continue: see ``join``."""
        with self._wake:
            self._closed = True
            left = self._jobs
            self._jobs = deque()
            self._wake.notify_all()
        for job, _ in left:
            job.give_up()

    def join(self, deadline: Deadline) -> None:
        """Wait for the threads, after ``close``."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(deadline.remaining())

    def _next(self) -> tuple[QueuedJob, Context] | None:
        with self._wake:
            while not self._jobs and not self._closed:
                self._wake.wait()
            return self._jobs.popleft() if self._jobs else None

    def _work(self) -> None:
        while (queued := self._next()) is not None:
            job, context = queued
            try:
                context.run(job.run)
            except Exception as error:  # noqa: BLE001 - the edge of a thread: it ends this job
                self._report(job, error)

    def _report(self, job: QueuedJob, error: Exception) -> None:
        if self._closed:  # the store was closed while the job used it
            log.debug("%s was interrupted", type(job).__name__, exc_info=error)
            return
        log.error("%s failed", type(job).__name__, exc_info=error)
        self._crashed()
