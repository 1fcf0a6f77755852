"""Quotas of tenants: charged at the start, restored over time, unused tokens given back."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import pytest

from kvrelay.errors import Exhausted, KvrelayError, Rejected, Unservable
from kvrelay.rpc.security.identity import Tenant
from router.queue.quotas import QuotaHold, Quotas


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_at_once() -> None:
    quotas, alice, bob = Quotas(Clock()), Tenant("alice", max_requests=2), Tenant("bob")
    with quotas.hold(alice), quotas.hold(alice), quotas.hold(bob):
        with pytest.raises(Exhausted, match="'alice' has 2 requests"), quotas.hold(alice):
            pass
        with quotas.hold(bob):
            assert quotas.requests(bob) == 2
    assert quotas.requests(alice) == quotas.requests(bob) == 0
    with quotas.hold(alice):
        assert quotas.requests(alice) == 1


def test_a_place_is_given_back_when_its_request_fails() -> None:
    quotas, alice = Quotas(Clock()), Tenant("alice", max_requests=1)
    for _ in range(3):
        with pytest.raises(RuntimeError), quotas.hold(alice):
            raise RuntimeError
    assert quotas.requests(alice) == 0


def test_tokens_of_a_minute() -> None:
    clock = Clock()
    quotas, alice = Quotas(clock), Tenant("alice", tokens_per_minute=600)
    with quotas.hold(alice) as hold:
        hold.charge(500)
        hold.used = 500
    with quotas.hold(alice) as hold:
        with pytest.raises(Exhausted, match="600 tokens") as caught:
            hold.charge(150)
        assert caught.value.retry_after == pytest.approx(5.0)  # 50 tokens at 10 a second
    clock.now += 5.0
    with quotas.hold(alice) as hold:
        hold.charge(150)
        with pytest.raises(Exhausted):
            hold.charge(1)


def test_what_was_not_used_comes_back() -> None:
    quotas, alice = Quotas(Clock()), Tenant("alice", tokens_per_minute=600)
    for _ in range(9):
        with quotas.hold(alice) as hold:
            hold.charge(120)
            hold.used = 60
    with quotas.hold(alice) as hold:
        hold.charge(60)
        with pytest.raises(Exhausted):
            hold.charge(1)


def test_what_came_back_by_itself_is_not_given_back_again() -> None:
    """A tenant that keeps requests open and uses little would get twice its tokens."""
    clock = Clock()
    quotas, alice = Quotas(clock), Tenant("alice", tokens_per_minute=600)
    with ExitStack() as late:
        with quotas.hold(alice) as first, quotas.hold(alice) as second:
            last = late.enter_context(quotas.hold(alice))
            first.charge(200)
            second.charge(200)
            last.charge(200)
            clock.now += 50.0  # 500 tokens: those of the first, the second, and half of the last
            with quotas.hold(alice) as other:
                other.charge(500)
                other.used = 500
        with quotas.hold(alice) as more, pytest.raises(Exhausted) as caught:
            more.charge(100)
        assert caught.value.retry_after == pytest.approx(10.0)
    with quotas.hold(alice) as more:
        more.charge(100)  # given back at the end of the last
        with pytest.raises(Exhausted):
            more.charge(1)


def test_more_than_a_minute_has_is_never_served() -> None:
    quotas, alice = Quotas(Clock()), Tenant("alice", tokens_per_minute=600)
    with quotas.hold(alice) as hold, pytest.raises(Rejected, match="max_tokens"):
        hold.charge(601)


def test_a_clock_that_stands_still_gives_nothing() -> None:
    clock = Clock()
    quotas, alice = Quotas(clock), Tenant("alice", tokens_per_minute=60)
    with quotas.hold(alice) as hold:
        for _ in range(60):
            hold.charge(1)
        with pytest.raises(Exhausted):
            hold.charge(1)
        clock.now += 3600
        hold.charge(60)
        with pytest.raises(Exhausted):
            hold.charge(1)


def left(quotas: Quotas, tenant: Tenant) -> int:
    """Tokens that the tenant may still be charged."""
    with quotas.hold(tenant) as hold:
        for tokens in range(600, -1, -1):
            try:
                hold.charge(tokens)
            except Exhausted:
                continue
            return tokens
    return -1  # it has used more than it may


def refuse(
    quotas: Quotas,
    tenant: Tenant,
    text: int,
    charge: int,
    error: KvrelayError | None = None,
) -> None:
    """A request of ``text`` tokens that is refused when it is charged, or with ``error``."""
    with suppress(Rejected, Exhausted, Unservable), quotas.hold(tenant) as hold:
        hold.tokenized(text)
        hold.charge(charge)
        raise error or AssertionError("it was not refused")


def test_a_request_that_is_refused_pays_for_its_text() -> None:
    quotas, alice = Quotas(Clock()), Tenant("alice", tokens_per_minute=600)
    refuse(quotas, alice, 80, 0, Rejected("max_tokens", "it fits on no worker"))
    refuse(quotas, alice, 80, 0, Unservable("no pool holds it"))
    assert left(quotas, alice) == 440
    refuse(quotas, alice, 160, 480)  # with the output it needs more than is left
    assert left(quotas, alice) == 430  # a sixteenth of the text, since it will be sent again
    refuse(quotas, alice, 160, 200, Exhausted("the queue is full", 1.0))
    assert left(quotas, alice) == 420
    with quotas.hold(alice) as hold:
        hold.tokenized(160)
        hold.charge(200)
        hold.used = 160 + 30
    assert left(quotas, alice) == 230  # as if it had come as token ids


def test_a_tenant_in_debt_is_refused_before_its_message_is_read() -> None:
    clock = Clock()
    quotas, alice = Quotas(clock), Tenant("alice", tokens_per_minute=600)
    refuse(quotas, alice, 4096, 0, Rejected("prompt", "too long"))
    with quotas.hold(alice) as hold, pytest.raises(Exhausted) as caught:
        hold.charge(0)
    assert caught.value.retry_after == pytest.approx(349.6)
    clock.now += 350.0
    with quotas.hold(alice) as hold:
        hold.charge(0)
        hold.charge(4)


def test_retries_at_the_limit_do_not_use_up_what_they_wait_for() -> None:
    """Ten clients of a tenant send one request each second until it runs: all of them get there."""
    clock = Clock()
    quotas, alice = Quotas(clock), Tenant("alice", tokens_per_minute=600)
    waiting, seconds = 10, 0
    while waiting:
        for _ in range(waiting):
            try:
                with quotas.hold(alice) as hold:
                    hold.charge(0)
                    hold.tokenized(100)
                    hold.charge(120)
                    hold.used = 120
            except Exhausted:
                continue
            waiting -= 1
        clock.now += 5.0
        seconds += 5
    assert seconds <= 400  # 60 s without any refusal


def test_prompts_that_came_together_need_their_tokens_together() -> None:
    """Each may have its own tokens, and all of them never: to send them again would not help."""
    quotas, alice = Quotas(Clock()), Tenant("alice", tokens_per_minute=60)
    group: list[QuotaHold] = []
    with quotas.hold(alice, group) as first:
        first.charge(40)
        with quotas.hold(alice, group) as second, pytest.raises(Rejected, match="need 61 tokens"):
            second.charge(21)
        with quotas.hold(alice) as other, pytest.raises(Exhausted):
            other.charge(21)
    assert not group
    with quotas.hold(alice, group) as again:
        again.charge(60)


def test_a_request_may_count_as_several() -> None:
    quotas, alice = Quotas(Clock()), Tenant("alice", max_requests=4)
    with quotas.hold(alice) as hold:
        hold.widen(3)
        assert quotas.requests(alice) == 3
        with quotas.hold(alice) as other:
            with pytest.raises(Exhausted, match="3 other requests open and may have 4"):
                other.widen(2)
            with pytest.raises(Rejected, match=r"5 samples .* may have 4 open") as caught:
                other.widen(5)
            assert caught.value.field == "n"
            with pytest.raises(Exhausted, match="has 4 requests open"), quotas.hold(alice):
                pass
        assert quotas.requests(alice) == 3
        hold.widen(4)
        assert quotas.requests(alice) == 4
    assert quotas.requests(alice) == 0
    assert quotas.refused["tenant_requests"] == 2
    with quotas.hold(Tenant("free")) as hold:
        hold.widen(128)
