"""A job that raises is reported, unless what it worked with was closed under it."""

from __future__ import annotations

import threading

import pytest

from kvrelay.connector.thread_pool import ThreadPool
from kvrelay.rpc.deadline import Deadline

PATIENCE = 10.0


class Failing:
    """Raises when it may."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.fails = threading.Event()

    def run(self) -> None:
        self.begun.set()
        assert self.fails.wait(PATIENCE)
        raise ValueError("the channel is closed")

    def give_up(self) -> None:
        raise AssertionError("it had begun")


@pytest.mark.parametrize("closed", [False, True])
def test_a_job_that_raises(closed: bool, caplog: pytest.LogCaptureFixture) -> None:
    crashes: list[int] = []
    pool, job = ThreadPool("test", 1, lambda: crashes.append(1)), Failing()
    pool.start()
    pool.submit(job)
    assert job.begun.wait(PATIENCE)
    if closed:
        pool.close()
    job.fails.set()
    if not closed:
        pool.submit(after := Failing())  # the thread lives, and has reported
        assert after.begun.wait(PATIENCE)
        after.fails.set()
    pool.close()
    pool.join(Deadline.after(PATIENCE))
    assert bool(crashes) != closed
    assert ("Failing failed" in caplog.text) != closed
