"""Admission control before an ideal server, in simulated time: estimates and outcomes."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator

import pytest

from kvrelay.errors import Exhausted
from router.queue.admission import LONGEST, AdmissionControl
from router.queue.fair import QueuedRequest

TOKENS = 100
EVER = 1e9  # as patient as the requests of ``crowd``


class Server:
    """Answers each request in ``seconds``, as many at once as there are slots."""

    def __init__(self, slots: int, seconds: float, queue_seconds: float = 120.0) -> None:
        self.admission = AdmissionControl(1 << 30, queue_seconds)
        self.admission.resize(slots, 0.0)
        self.seconds = seconds
        self.spread: random.Random | None = None  # else all take as long
        self.whole = self.refused = 0
        self.waited: dict[int, float] = {}
        self._waiting: dict[int, tuple[float, float]] = {}  # since when, until when
        self._takes: dict[int, float] = {}
        self._ends: list[tuple[float, int]] = []
        self._keys = itertools.count()

    def run(self, now: float) -> None:
        """Run the server until ``now``."""
        while self._ends and self._ends[0][0] <= now:
            at, key = heapq.heappop(self._ends)
            _, until = self._waiting.pop(key)
            self.whole += at < until
            self._go(self.admission.leave(key, at, at < until).started, at)

    def ask(
        self, now: float, timeout: float = EVER, tenant: str = "", takes: float | None = None
    ) -> int | None:
        """The key of a new request, ``None`` if it was refused."""
        key = next(self._keys)
        try:
            one = QueuedRequest(key, TOKENS, tenant, until=now + timeout, timeout=timeout)
            step = self.admission.offer(one, now)
        except Exhausted:
            self.refused += 1
            return None
        self._waiting[key] = now, now + timeout
        self._takes[key] = self.seconds if takes is None else takes
        self._go(step.started, now)
        return key

    def _go(self, keys: tuple[int, ...], now: float) -> None:
        for key in keys:
            since, until = self._waiting[key]
            self.waited[key] = now - since
            takes = self._takes.pop(key)
            takes *= self.spread.lognormvariate(-0.06, 0.35) if self.spread else 1.0
            heapq.heappush(self._ends, (min(now + takes, max(now, until)), key))


def arrivals(seed: int, rate: float, until: float) -> Iterator[float]:
    print("seed", seed)
    chance, now = random.Random(seed), 0.0
    while (now := now + chance.expovariate(rate)) < until:
        yield now


def crowd(slots: int, seconds: float, until: float) -> Server:
    """Slightly more requests than can be served: some always wait."""
    server, every = Server(slots, seconds, 1e9), seconds / slots
    for _ in range(slots):
        server.ask(0.0)
    for turn in range(int(until / every)):
        now = every * turn
        server.run(now)
        server.ask(now)
    server.run(until)
    return server


@pytest.mark.parametrize("timeout", [12.0, 20.0, 60.0])
@pytest.mark.parametrize("spread", [None, random.Random(2)])
def test_at_five_times_the_capacity_as_many_are_served_in_time(
    timeout: float, spread: random.Random | None
) -> None:
    """The deadline is far shorter than the queue, and service takes much of it."""
    slots, seconds, lasts = 10, 7.0, 600.0
    server, capacity = Server(slots, seconds), slots / seconds
    server.spread = spread
    for now in arrivals(1, 5 * capacity, lasts):
        server.run(now)
        server.ask(now, timeout)
    assert server.whole >= 0.9 * capacity * lasts


@pytest.mark.parametrize("slots", [1, 2, 9])
def test_the_rate_of_long_answers_is_known_at_any_moment(slots: int) -> None:
    """One ends in many half-lives of the estimate."""
    seconds = 90.0
    server, rate = crowd(slots, seconds, 600.0), slots * TOKENS / seconds
    for moment in range(600, 1200, 7):
        server.run(moment)
        server.ask(moment)
        assert server.admission.rate == pytest.approx(rate, rel=0.5)


def test_what_waits_in_a_long_queue_waits_as_long_as_was_said() -> None:
    server = crowd(1, 60.0, 600.0)
    server.admission._queue_seconds = 200.0
    while server.ask(601.0) is not None:
        pass
    with pytest.raises(Exhausted, match=r"about 2[0-9]{2}\.. s"):
        server.admission.offer(QueuedRequest(1 << 40, TOKENS), 601.0)
    last = max(server._waiting)
    server.run(2000.0)
    assert 100.0 < server.waited[last] < 300.0


def test_after_a_standstill_of_a_minute_the_same_is_said_soon() -> None:
    """The process was stopped: requests that ended meanwhile say little of the rate."""
    server = crowd(8, 2.0, 60.0)
    server.run(60.0)
    for _ in range(400):
        server.ask(60.0)
    before = server.admission.rate
    late = [heapq.heappop(server._ends) for _ in range(len(server._ends))]
    for _, key in late:  # all ended meanwhile, and their ends are seen at once
        server._waiting.pop(key)
        server._go(server.admission.leave(key, 122.0).started, 122.0)
    server.run(146.0)
    assert server.admission.rate == pytest.approx(before, rel=0.3)


def test_workers_that_come_and_go_change_the_rate_at_once() -> None:
    server = crowd(20, 2.0, 60.0)
    for _ in range(1000):
        server.ask(60.0)
    before = server.admission.rate
    assert before is not None
    server.admission.resize(2, 60.0)
    assert server.admission.rate == pytest.approx(before / 10, rel=0.1)
    server.run(100.0)
    assert server.admission.rate == pytest.approx(before / 10, rel=0.5)
    server._go(server.admission.resize(20, 100.0).started, 100.0)
    server.run(110.0)
    assert server.admission.rate == pytest.approx(before, rel=0.5)


def test_many_tenants_with_one_request_each_wait_for_one_another() -> None:
    """A new tenant has no request before its first one, which does not run at once for that."""
    server = crowd(1, 1.0, 60.0)
    for tenant in range(60):
        server.ask(60.0, tenant=f"t{tenant}")
    with pytest.raises(Exhausted, match="would wait"):
        server.admission.offer(QueuedRequest(1 << 40, TOKENS, "new", until=65.0), 60.0)
    key = server.ask(60.0, tenant="new")
    assert key is not None
    server.run(200.0)
    assert server.waited[key] > 50.0


def delays(admission: AdmissionControl, tenant: str, count: int, now: float) -> list[float]:
    """``retry_after`` of ``count`` requests for which there is no place."""
    told = []
    for _ in range(count):
        with pytest.raises(Exhausted) as refused:
            admission.evict_for(tenant, 1.0, 1024, now)
        told.append(refused.value.retry_after)
    return told


def test_those_for_whom_there_is_no_place_come_back_one_after_another() -> None:
    """Their size is not known; each counts as a usual request."""
    server = crowd(1, 1.0, 60.0)
    told = delays(server.admission, "", 50, 60.0)
    assert told[-1] == pytest.approx(50.0, rel=0.2)
    assert len(set(told)) == 50


def test_before_anything_is_known_not_all_come_back_at_one_moment() -> None:
    admission = AdmissionControl(1 << 30, 120.0)
    admission.resize(10, 0.0)
    for key in range(100):
        admission.offer(QueuedRequest(key, TOKENS), 0.0)
    told = delays(admission, "", 1000, 0.0)
    assert told[0] == 1.0
    assert told[-1] == pytest.approx(10.0, rel=0.1)  # ten times as many as are present


def test_whoever_asks_without_end_does_not_lengthen_the_delay_of_others() -> None:
    server = crowd(1, 1.0, 60.0)
    delays(server.admission, "greedy", 10_000, 60.0)
    assert delays(server.admission, "greedy", 1, 60.0) == [LONGEST]
    (told,) = delays(server.admission, "small", 1, 60.0)
    assert told < 5.0


def test_what_a_tenant_had_in_a_crowd_does_not_count_when_there_was_room_since() -> None:
    """A share of a hundredth, and one large request an hour ago."""
    admission = AdmissionControl(1 << 30, 1e9)
    admission.resize(1, 0.0)
    admission.offer(QueuedRequest(0, TOKENS), 0.0)
    admission.offer(QueuedRequest(1, 10_000, "light", 0.01), 0.0)
    admission.leave(0, 1.0)
    admission.leave(1, 2.0)
    for key in range(2, 12):
        admission.offer(QueuedRequest(key, TOKENS), 3600.0)
    admission.offer(QueuedRequest(99, TOKENS, "light", 0.01), 3600.0)
    order = [key for at in range(2, 12) for key in admission.leave(at, 3600.0).started]
    assert 99 in order[:2]


def test_who_would_be_late_makes_room_when_its_turn_comes() -> None:
    server = crowd(1, 10.0, 100.0)
    admission = server.admission
    server.run(100.0)
    while admission.waiting:
        server.run(server._ends[0][0])
    now = server._ends[0][0] - 8.0
    # It would wait for 5 s on average and take 15 s at most, but its slot comes in 8.
    admission.offer(QueuedRequest(1 << 40, TOKENS, until=now + 22.0, timeout=EVER), now)
    admission.offer(QueuedRequest((1 << 40) + 1, TOKENS, until=now + 100.0, timeout=EVER), now)
    step = admission.leave(server._ends[0][1], now + 8.0)
    assert step.started == ((1 << 40) + 1,)
    assert [key for key, _ in step.refused] == [1 << 40]
    assert (admission.running, admission.waiting) == (1, 0)


def test_an_answer_that_is_nearly_whole_needs_little_time() -> None:
    """It is resumed: its tokens so far are not made again."""
    server = crowd(10, 20.0, 200.0)
    server.run(200.0)
    server.ask(200.0)
    with pytest.raises(Exhausted, match="take 30"):
        server.admission.offer(QueuedRequest(1 << 40, TOKENS, until=220.0, timeout=EVER), 200.0)
    resumed = QueuedRequest(1 << 40, TOKENS, until=220.0, part=0.1, timeout=EVER)
    server.admission.offer(resumed, 200.0)
    assert server.admission.waiting == 2


@pytest.mark.parametrize("begun_badly", [False, True])
def test_answers_of_seconds_are_not_refused_for_answers_of_minutes(begun_badly: bool) -> None:
    """There is always somebody with a long one in the queue. Also where the first of the short
    ones were all cut off, for whatever reason: it is tried again how long they take."""
    slots, long, short, lasts = 10, 60.0, 5.0, 4000.0
    server = Server(slots, long)
    capacity, served = slots / (long + short), 0
    if begun_badly:
        for _ in range(slots):
            server.ask(0.0, 60.0, "short", 1e9)
    for now in arrivals(1, 4 * capacity, lasts):
        server.run(now)
        server.ask(now, 3600.0, "long")
        key = server.ask(now, 60.0, "short", short)
        served += key is not None
    assert served >= 0.8 * capacity * lasts
