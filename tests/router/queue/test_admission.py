"""The queue in front of the workers: properties of the pure parts, over random requests."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.errors import Exhausted
from router.queue.admission import LONGEST, AdmissionControl
from router.queue.fair import HIGHEST, LOWEST, PRIORITY_TOKENS, FairQueue, QueuedRequest

TENANTS = ("a", "b", "c")
MOST = 500  # tokens of one request

requests = st.builds(
    QueuedRequest,
    key=st.just(0),
    tokens=st.integers(1, MOST),
    tenant=st.sampled_from(TENANTS),
    weight=st.just(1.0),
    priority=st.integers(LOWEST, HIGHEST),
    until=st.sampled_from((5.0, 40.0, 1e9)),
)


def keyed(key: int, one: QueuedRequest) -> QueuedRequest:
    return QueuedRequest(key, one.tokens, one.tenant, one.weight, one.priority, one.until)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(("push", "pop", "remove")), requests), max_size=60))
def test_it_is_bounded_counts_right_and_loses_nobody(
    events: list[tuple[str, QueuedRequest]],
) -> None:
    limit, inside = 2000, dict[int, QueuedRequest]()
    queue = FairQueue(limit)
    for key, (what, one) in enumerate(events):
        if what == "push":
            pushed = queue.push(keyed(key, one))
            if pushed is not None:
                inside[key] = keyed(key, one)
            for other in pushed or ():
                del inside[other.key]
        elif what == "pop":
            went = queue.pop()
            assert (went is None) == (not inside)  # work conserving
            if went is not None:
                assert inside.pop(went.key) == went
        elif inside:
            gone = random.Random(key).choice(sorted(inside))
            queue.remove(gone)
            del inside[gone]
        assert len(queue) == len(inside)
        assert queue.tokens == sum(one.tokens for one in inside.values()) <= limit
    while (went := queue.pop()) is not None:
        del inside[went.key]
    assert not inside
    assert queue.tokens == 0


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.sampled_from((0.5, 1.0, 2.0, 4.0)), min_size=2, max_size=4),
    st.integers(0, 1 << 32),
)
def test_tenants_differ_by_one_request_of_each_at_most(weights: list[float], seed: int) -> None:
    chance, queue = random.Random(seed), FairQueue(1 << 40)
    for key in range(100 * len(weights)):
        tenant = key % len(weights)
        tokens, priority = chance.randint(1, MOST), chance.randint(LOWEST, HIGHEST)
        queue.push(QueuedRequest(key, tokens, str(tenant), weights[tenant], priority))
    served, left = Counter[str](), Counter({str(t): 100 for t in range(len(weights))})
    while all(left.values()):
        went = queue.pop()
        assert went is not None
        served[went.tenant] += went.tokens
        left[went.tenant] -= 1
        for a, b in combinations(range(len(weights)), 2):
            apart = abs(served[str(a)] / weights[a] - served[str(b)] / weights[b])
            assert apart <= MOST / weights[a] + MOST / weights[b]


def test_a_tenant_gains_nothing_by_asking_one_after_another() -> None:
    """Its virtual time is kept while the others wait."""
    queue, served = FairQueue(1 << 30), Counter[str]()
    for key in range(1000):
        queue.push(QueuedRequest(key, 100, "crowd"))
    key = 1000
    queue.push(QueuedRequest(key, 1000, "one"))
    for _ in range(400):
        went = queue.pop()
        assert went is not None
        served[went.tenant] += went.tokens
        if went.tenant == "one":
            key += 1
            queue.push(QueuedRequest(key, 1000, "one"))
    assert abs(served["one"] - served["crowd"]) <= 1100


@pytest.mark.parametrize("rival", ["mine", "other"])
def test_nobody_starves(rival: str) -> None:
    """The lowest priority, while more urgent requests keep coming."""
    queue, passed = FairQueue(1 << 30), 0
    queue.push(QueuedRequest(0, 100, "mine", 1.0, LOWEST))
    for key in range(1, 10_000):
        queue.push(QueuedRequest(key, 100, rival, 1.0, HIGHEST))
        went = queue.pop()
        assert went is not None
        if went.key == 0:
            break
        passed += went.tokens
    assert passed <= (HIGHEST - LOWEST) * PRIORITY_TOKENS + 100


def test_a_higher_priority_goes_before() -> None:
    queue = FairQueue(10_000)
    for key, priority in enumerate((0, 1, -1, 8, 1)):
        queue.push(QueuedRequest(key, 10, priority=priority))
    assert [one.key for _ in range(5) if (one := queue.pop()) is not None] == [3, 1, 4, 0, 2]


def test_a_tenant_below_its_share_pushes_out_the_greediest() -> None:
    queue = FairQueue(1000)
    for key in range(10):
        assert queue.push(QueuedRequest(key, 100, "greedy")) == []
    assert queue.push(QueuedRequest(10, 100, "greedy")) is None
    out = queue.push(QueuedRequest(11, 250, "small"))
    assert out is not None
    assert [one.key for one in out] == [9, 8, 7]  # the newest ones
    assert queue.push(QueuedRequest(12, 250, "small")) is not None
    assert queue.push(QueuedRequest(13, 50, "small")) is None  # it has its half
    assert queue.tokens <= 1000


def test_whoever_has_most_requests_for_its_weight_makes_room() -> None:
    queue = FairQueue(1 << 30)
    assert queue.evictable("anyone", 1.0) is None
    for key in range(6):
        queue.push(QueuedRequest(key, 1, "many"))
    for key in range(6, 14):
        queue.push(QueuedRequest(key, 1000, "heavy", 4.0))
    assert queue.evictable("many", 1.0) is None  # it has most itself
    found = queue.evictable("other", 1.0)
    assert found is not None
    assert found.key == 5  # the last of many: 6 beside 8 / 4
    assert queue.evictable("other", 0.1) is None  # one request is ten for its weight


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(("offer", "leave", "resize")), requests), max_size=80),
    st.integers(1, 5),
)
def test_no_slot_is_empty_while_somebody_waits(
    events: list[tuple[str, QueuedRequest]], slots: int
) -> None:
    admission, states = AdmissionControl(2000, 1e9), dict[int, str]()
    admission.resize(slots, 0.0)
    for key, (what, one) in enumerate(events):
        now = float(key)
        try:
            if what == "offer":
                states[key] = "waits"
                step = admission.offer(keyed(key, one), now)
            elif what == "leave" and states:
                gone = random.Random(key).choice(sorted(states))
                del states[gone]
                step = admission.leave(gone, now, whole=bool(one.tokens % 2))
            else:
                slots = 1 + one.tokens % 5
                step = admission.resize(slots, now)
        except Exhausted:
            del states[key]
            continue
        for other in step.started:
            assert states[other] == "waits"  # no request runs twice, or after it left
            states[other] = "runs"
        for other, _ in step.refused:
            assert states.pop(other) == "waits"
        count = Counter(states.values())
        assert (admission.waiting, admission.running) == (count["waits"], count["runs"])
        assert not count["waits"] or count["runs"] >= slots
    for key in list(states):
        admission.leave(key, 1e6)
    assert (admission.waiting, admission.waiting_tokens, admission.running) == (0, 0, 0)


def saturated(queue_tokens: int = 100_000, queue_seconds: float = 1e9) -> AdmissionControl:
    """One slot, a second for each request of 100 tokens, and twenty requests that wait."""
    admission = AdmissionControl(queue_tokens, queue_seconds)
    admission.resize(1, 0.0)
    for key in range(41):
        admission.offer(QueuedRequest(key, 100), 0.0)
    for key in range(20):
        assert admission.leave(key, key + 1.0).started == (key + 1,)
    return admission


def test_the_rate_is_that_of_the_queue_while_there_is_one() -> None:
    admission = saturated()
    assert admission.rate == pytest.approx(100, rel=0.05)
    for key in range(20, 41):
        admission.leave(key, key + 1.0)
    measured = admission.rate
    admission.resize(1, 1000.0)  # the queue is empty: time that passes says nothing
    assert admission.rate == measured == pytest.approx(100, rel=0.05)
    assert AdmissionControl(1, 1.0).rate is None


def test_a_measure_ages_while_nobody_waits() -> None:
    """The estimate of a standstill does not hold for a queue of an hour later."""
    admission = AdmissionControl(100_000, 120.0)
    admission.resize(1, 0.0)
    for key in range(3):
        admission.offer(QueuedRequest(key, 100), 0.0)
    admission.leave(0, 1.0)
    admission.leave(2, 500.0)  # it gave up
    admission.leave(1, 500.0)
    now = 4000.0
    for key in range(10, 12):
        admission.offer(QueuedRequest(key, 100), now)
    admission.leave(10, now + 1.0)  # a hundred tokens a second again
    assert admission.rate == pytest.approx(100, rel=0.05)
    for key in range(12, 32):
        admission.offer(QueuedRequest(key, 100), now + 1.0)
    assert admission.waiting == 20


def test_the_first_few_to_end_do_not_say_how_fast_it_goes() -> None:
    """Forty begin at the same moment; two short ones end long before the others."""
    admission = AdmissionControl(1_000_000, 120.0)
    admission.resize(40, 0.0)
    for key in range(300):
        admission.offer(QueuedRequest(key, 100), 0.0)
    for key in range(2):
        admission.leave(key, 1.0)
    assert admission.rate == pytest.approx(4000, rel=0.01)  # as if all were so short
    # 26,000 tokens wait, and 200 were served in a second.
    admission.offer(QueuedRequest(300, 100, until=101.0), 1.0)
    for key in range(2, 40):
        admission.leave(key, 2.0)
    assert admission.rate == pytest.approx(2000, rel=0.1)


def test_time_in_which_no_worker_runs_is_not_counted() -> None:
    admission = saturated()
    admission.resize(1, 20.0, halted=True)
    admission.resize(1, 30.0)
    assert admission.rate == pytest.approx(100, rel=0.05)
    for key in range(20, 30):
        admission.leave(key, key + 11.0)
    assert admission.rate == pytest.approx(100, rel=0.05)


def test_requests_that_lost_a_worker_do_not_say_how_fast_it_goes() -> None:
    """After an outage hundreds come back at once: the queue drains as before it."""
    admission = saturated()
    for key in range(20, 30):
        admission.leave(key, 20.0 + 30.0 * (key - 19), moved=True)
    assert admission.rate == pytest.approx(100, rel=0.05)
    now = 330.0
    admission.offer(QueuedRequest(1000, 100, until=now + 90.0), now)
    for key in range(30, 40):
        admission.leave(key, now + 30.0 * (key - 29))
    assert admission.rate is not None
    assert admission.rate < 10, "these lost no worker"


def test_a_request_cut_off_at_once_does_not_say_how_fast_it_goes() -> None:
    """One of whose kind nothing is known, and that ran for seconds, does."""
    admission = AdmissionControl(1_000, 120.0)
    admission.resize(2, 0.0)
    for key in range(4):
        admission.offer(QueuedRequest(key, 100), 0.0)
    for key in range(4):
        admission.leave(key, 0.01, whole=False)
    assert admission.rate is None
    admission.offer(QueuedRequest(4, 100), 1.0)
    admission.leave(4, 11.0, whole=False)
    assert admission.rate == pytest.approx(20)


def test_nobody_is_refused_for_a_measure_of_an_hour_ago() -> None:
    admission = AdmissionControl(100_000, 120.0)
    admission.resize(1, 0.0)
    for key in range(5):
        admission.offer(QueuedRequest(key, 100), 0.0)
    for key in range(5):
        admission.leave(key, 60.0 * (key + 1))  # a limping worker
    now = 4000.0
    admission.resize(4, now)
    for key in range(10, 50):
        admission.offer(QueuedRequest(key, 100), now)
    assert (admission.running, admission.waiting) == (4, 36)


def test_who_cannot_be_in_time_is_refused_early() -> None:
    admission = saturated()
    with pytest.raises(Exhausted, match=r"about 20.* s and take 1.5 s more: it has 5.0") as refused:
        admission.offer(QueuedRequest(99, 100, until=25.0), 20.0)
    assert refused.value.retry_after == pytest.approx(17, rel=0.1)
    assert admission.offer(QueuedRequest(99, 100, until=50.0), 20.0).started == ()
    with pytest.raises(Exhausted):
        saturated(queue_seconds=5.0).offer(QueuedRequest(99, 100), 20.0)
    # Another tenant has no request before it: it is next but one.
    assert saturated().offer(QueuedRequest(99, 100, "other", until=25.0), 20.0).started == ()


def test_the_refused_do_not_all_come_back_at_one_moment() -> None:
    admission, delays = saturated(queue_tokens=4000), list[float]()
    for key in range(100, 160):
        try:
            admission.offer(QueuedRequest(key, 100), 20.0)
        except Exhausted as refused:
            delays.append(refused.retry_after)
    assert len(delays) == 40
    apart = [later - one for one, later in pairwise(delays)]
    assert all(gap == pytest.approx(1.0, rel=0.1) for gap in apart)  # as fast as it drains
    for key in range(1000, 1100):
        with pytest.raises(Exhausted) as one_more:
            admission.offer(QueuedRequest(key, 100), 20.0)
    assert one_more.value.retry_after <= LONGEST


def test_a_request_larger_than_the_queue_runs_where_nobody_waits() -> None:
    admission = AdmissionControl(10, 1.0)
    admission.resize(1, 0.0)
    assert admission.offer(QueuedRequest(0, 100, until=1.0), 0.0).started == (0,)
