"""Signals of commands that own a cluster: handled whatever the main thread does."""

from __future__ import annotations

import os
import queue
import signal
import threading

import pytest

from kvrelay.cli.signals import NUMBERS, Signals


@pytest.mark.parametrize("number", NUMBERS)
def test_one_that_another_thread_gets_is_heard(number: int) -> None:
    """The kernel chooses the thread; Python's handler would wait for the main one."""
    numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    try:
        with Signals(numbers.put):
            assert other.ident is not None
            signal.pthread_kill(other.ident, number)
            assert numbers.get(timeout=20) == number
    finally:
        over.set()
        other.join()


def test_what_was_before_is_put_back() -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    files = len(os.listdir("/dev/fd"))
    with Signals(lambda number: None):
        assert [signal.getsignal(number) for number in NUMBERS] != before
    assert [signal.getsignal(number) for number in NUMBERS] == before
    assert len(os.listdir("/dev/fd")) == files
