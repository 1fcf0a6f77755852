"""What follows from a failed leg: the same request elsewhere, a pause, or the end of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from kvrelay.errors import DeadlineExceeded, Draining, Exhausted, KvrelayError, Mismatch, Rejected
from kvrelay.rpc.deadline import Deadline
from kvrelay.v1 import types_pb2
from router.generate.request import AcceptedRequest
from router.generate.retry import (
    DEATH_SECONDS,
    MAX_BACKOFF_SECONDS,
    SERVED_WELL,
    Attempts,
    FailedLeg,
    PoisonList,
    PoisonRequest,
    RetryControl,
    RetryLimits,
    RetryStep,
    TokenBucket,
)
from router.workers.health import WorkerLost, WorkerSilent

REQUEST = AcceptedRequest("a", (6,), (), 8, types_pb2.Sampling(seed=1), Deadline(1000.0))


class Retried:
    """The retries of one request."""

    def __init__(self, limits: RetryLimits | None = None, rate: float = 1e6) -> None:
        self.control = RetryControl(limits or RetryLimits(), PoisonList(60.0), TokenBucket(rate, 1))
        self.attempts = Attempts()

    def step(self, key: str, error: KvrelayError, generated: int, now: float = 0.0) -> RetryStep:
        leg = FailedLeg(key, error, generated, streaming=generated > 0)
        return self.control.failed(REQUEST, self.attempts, leg, now)

    def recount(
        self, now: float, answered: Mapping[str, float] | None = None, **died: float
    ) -> float:
        return self.control.recount(REQUEST, self.attempts, now, answered or {}, died)

    def suspects(
        self,
        key: str,
        error: KvrelayError,
        generated: int,
        streaming: bool,
        now: float = 0.0,
        answered: Mapping[str, float] | None = None,
    ) -> bool:
        """Whether it continues, and the worker is suspect; raises the error that ends it."""
        leg = FailedLeg(key, error, generated, streaming)
        step = self.control.failed(REQUEST, self.attempts, leg, now, answered or {})
        if step.error is not None:
            raise step.error
        return step.suspect


def test_a_connection_that_breaks_twice_is_one_death() -> None:
    retried = Retried(RetryLimits(failures=3, deaths=2))
    for _ in range(3):
        assert retried.suspects("a", WorkerLost("x"), 0, False)
    with pytest.raises(WorkerLost):
        retried.suspects("a", WorkerLost("x"), 0, False)


def test_what_follows_a_failure() -> None:
    retried = Retried(RetryLimits(failures=3, deaths=2))
    attempts = retried.attempts
    assert retried.suspects("a", WorkerLost("x"), SERVED_WELL, True)
    assert retried.suspects("b", WorkerSilent("x"), 0, True)
    assert retried.suspects("c", Draining("x"), 0, True)
    assert attempts.excluded == set()
    assert retried.suspects("c", Draining("x"), 0, True)
    assert retried.suspects("d", WorkerLost("x"), SERVED_WELL - 1, True)
    with pytest.raises(PoisonRequest, match="2 workers died"):
        retried.suspects("e", WorkerLost("x"), 0, True)
    assert attempts.excluded == {"c"}
    assert attempts.avoided == set("abcde")
    with pytest.raises(PoisonRequest, match=r"workers died .* 2 s ago"):
        retried.control.poisons.check(REQUEST, 2.0)


def test_a_lost_connection_to_a_worker_that_lives_is_no_death() -> None:
    retried = Retried(RetryLimits(failures=9, deaths=2))
    answered: dict[str, float] = {}
    for at, key in enumerate("abcde"):  # each answers after it was lost, and never again
        assert retried.suspects(key, WorkerLost("x"), 0, False, at, answered)
        answered[key] = at + 0.5
    answered["e"] = 3.9
    with pytest.raises(PoisonRequest, match="2 workers died"):
        retried.suspects("f", WorkerLost("x"), 0, False, 5.0, answered)


def test_a_silent_worker_is_a_death_once_it_is_found_dead() -> None:
    retried = Retried()
    step = retried.step("a", WorkerSilent("x"), SERVED_WELL - 1, 10.0)
    assert (step.error, step.confirm, step.settle_until) == (None, True, 0.0)
    assert retried.recount(10.1, a=10.1) == 0.0  # one death alone
    step = retried.step("b", WorkerSilent("y"), 0, 11.0)
    assert (step.error, step.confirm, step.settle_until) == (None, False, 20.0)
    assert retried.recount(19.9) == 20.0
    assert retried.recount(20.0) == 0.0  # the first one was waited for long enough
    with pytest.raises(PoisonRequest, match=r"2 workers died .* \(the last one: y\)"):
        retried.recount(13.0, a=10.1, b=13.0)
    with pytest.raises(PoisonRequest, match=r"workers died .* 2 s ago"):
        retried.control.poisons.check(REQUEST, 15.0)


def test_a_lost_worker_after_a_silent_one_waits_for_its_fate() -> None:
    retried = Retried()
    retried.step("a", WorkerSilent("x"), 0, 10.0)
    step = retried.step("b", WorkerLost("x"), 0, 12.0)
    assert (step.error, step.confirm, step.settle_until) == (None, True, 20.0)
    assert retried.recount(15.0, {"a": 14.0}) == 0.0  # it lives
    assert retried.recount(20.0) == 0.0  # it was waited for long enough
    with pytest.raises(PoisonRequest, match="2 workers died"):
        retried.recount(25.0, a=24.0)


def test_a_silent_worker_that_answered_or_died_much_later_is_no_death() -> None:
    retried = Retried()
    retried.step("a", WorkerSilent("x"), 0, 10.0)
    retried.step("b", WorkerSilent("x"), 0, 10.0)
    retried.step("c", WorkerSilent("x"), SERVED_WELL, 10.0)
    late = 10.0 + DEATH_SECONDS + 0.1
    assert retried.recount(99.0, a=11.0, b=late, c=11.0) == 0.0
    assert retried.recount(99.0, {"b": 10.5}, a=11.0, b=12.0) == 0.0


@pytest.mark.parametrize("error", [Rejected("a", "b"), DeadlineExceeded("x"), Mismatch("a", "b")])
def test_what_no_other_worker_can_mend_ends_the_request(error: KvrelayError) -> None:
    assert Retried().step("a", error, 0) == RetryStep(error=error)


def test_a_full_worker_rests_and_a_stream_waits_for_it() -> None:
    retried = Retried()
    waits = retried.step("a", Exhausted("full", 40.0), 3, 5.0)
    assert waits == RetryStep(backoff=MAX_BACKOFF_SECONDS, resume_at=45.0)
    goes = retried.step("a", Exhausted("full", 0.5), 0, 5.0)
    assert goes == RetryStep(backoff=0.5, resume_at=5.0)
    assert retried.attempts.excluded == {"a"}
    assert retried.control.retried == {"again": 1, "elsewhere": 1}
    assert retried.control.migrations == 1


def test_the_others_are_asked_before_a_death_could_be_the_last_one() -> None:
    retried = Retried(rate=10.0)
    assert retried.step("a", WorkerLost("x"), 0, 5.0) == RetryStep(0.0, True, None, True, 5.0)
    paced = retried.step("b", WorkerSilent("x"), 0, 5.0)
    assert (paced.suspect, paced.confirm) == (True, False)
    assert paced.resume_at == pytest.approx(5.1)


def test_nothing_is_retried_after_the_deadline() -> None:
    retried = Retried()
    step = retried.step("a", WorkerSilent("x"), 0, 1000.0)
    assert step.suspect
    assert isinstance(step.error, DeadlineExceeded)
    assert "the router's --default-timeout" in str(step.error)
    assert not retried.control.retried


def test_moves_are_paced() -> None:
    bucket = TokenBucket(rate=10.0, burst=5)
    waits = [bucket.take(100.0) for _ in range(8)]
    assert waits == pytest.approx([0, 0, 0, 0, 0, 0.1, 0.2, 0.3], abs=1e-9)
    assert bucket.take(101.0) == 0.0
    later: Sequence[float] = [bucket.take(200.0) for _ in range(6)]
    assert later == pytest.approx([0, 0, 0, 0, 0, 0.1], abs=1e-9)
