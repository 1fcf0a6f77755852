"""A dead store costs its callers nothing but the first try."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import pytest

from kvrelay.errors import DeadlineExceeded, KvrelayError, Rejected, Unavailable
from kvstore import GetResult, LookupResult, Want
from kvstore.base import NameQuery
from kvstore.breaker import FIRST_PAUSE, LONGEST_PAUSE, BreakerStore
from kvstore.client.memory import MemoryStore


class Patient(MemoryStore):
    """Fails as told and counts how often it was asked."""

    def __init__(self) -> None:
        super().__init__("breaker")
        self.error: KvrelayError | None = None
        self.asked = 0

    def lookup(self, query: NameQuery, timeout: float) -> LookupResult:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return super().lookup(query, timeout)

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        yield from super().get(wants, timeout)


class Rig:
    def __init__(self) -> None:
        self.now = 100.0
        self.store = Patient()
        self.breaker = BreakerStore(self.store, clock=lambda: self.now)

    def ask(self, error: KvrelayError | None) -> None:
        self.store.error = error
        self.breaker.lookup(NameQuery([]), 1)


def test_after_a_failure_nobody_asks_until_the_pause_is_over() -> None:
    rig = Rig()
    with pytest.raises(Unavailable, match="gone"):
        rig.ask(Unavailable("gone"))
    for _ in range(10):
        with pytest.raises(Unavailable, match="next try"):
            rig.ask(None)
    assert rig.store.asked == 1
    rig.now += FIRST_PAUSE
    rig.ask(None)
    rig.ask(None)
    assert rig.store.asked == 3


def test_a_call_without_time_says_nothing_of_the_store() -> None:
    rig = Rig()
    for _ in range(5):
        with pytest.raises(DeadlineExceeded, match="no time was left"):
            rig.breaker.lookup(NameQuery([]), 0.0)
    rig.ask(None)
    assert rig.store.asked == 1


def test_the_pause_doubles_up_to_a_limit_and_an_answer_ends_it() -> None:
    rig = Rig()
    pauses = []
    for _ in range(8):
        with pytest.raises(Unavailable, match="gone"):
            rig.ask(Unavailable("gone"))
        before = rig.now
        while rig.now < before + 10:
            rig.now += 0.05
            asked = rig.store.asked
            with pytest.raises(Unavailable):
                rig.ask(Unavailable("gone"))
            if rig.store.asked > asked:
                break
        pauses.append(rig.now - before)
        rig.now += LONGEST_PAUSE
    assert pauses[0] == pytest.approx(FIRST_PAUSE, abs=0.06)
    assert max(pauses) == pytest.approx(LONGEST_PAUSE, abs=0.06)
    rig.now += LONGEST_PAUSE
    rig.ask(None)
    with pytest.raises(Unavailable, match="gone"):
        rig.ask(Unavailable("gone"))
    rig.now += FIRST_PAUSE + 0.01
    rig.ask(None)


def test_one_late_answer_is_forgiven_and_two_are_not() -> None:
    rig = Rig()
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            rig.ask(DeadlineExceeded("late"))
    with pytest.raises(Unavailable, match="next try"):
        rig.ask(None)


def test_an_answer_that_is_an_error_is_an_answer() -> None:
    rig = Rig()
    for _ in range(5):
        with pytest.raises(Rejected):
            rig.ask(Rejected("names", "no"))
    rig.ask(None)
    assert rig.store.asked == 6


def test_a_get_counts_when_it_is_read() -> None:
    rig = Rig()
    rig.store.error = Unavailable("gone")
    with pytest.raises(Unavailable, match="gone"):
        list(rig.breaker.get([], 1))
    with pytest.raises(Unavailable, match="next try"):
        list(rig.breaker.get([], 1))
    rig.now += FIRST_PAUSE
    rig.store.error = None
    assert list(rig.breaker.get([], 1)) == []


def test_a_get_that_nobody_reads_to_its_end_was_answered_all_the_same() -> None:
    """A timeout before it and one after it are not two in a row."""
    rig = Rig()
    with pytest.raises(DeadlineExceeded):
        rig.ask(DeadlineExceeded("slow"))
    wants = [Want(b"a" * 32, memoryview(bytearray(4))), Want(b"b" * 32, memoryview(bytearray(4)))]
    rig.store.error = None
    arriving = rig.breaker.get(wants, 1)
    assert next(arriving).header is None
    arriving.close()
    with pytest.raises(DeadlineExceeded):
        rig.ask(DeadlineExceeded("slow"))
    asked = rig.store.asked
    rig.ask(None)
    assert rig.store.asked == asked + 1, "the one timeout since then does not close it"
