"""The usage of a whole request: what a lost leg did not report is not taken from another."""

from __future__ import annotations

from kvrelay.v1 import types_pb2
from router.generate.usage import lost_leg, request_usage

PREFILL, DECODE = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE


def leg(role: types_pb2.Role.ValueType, **numbers: float) -> types_pb2.LegUsage:
    return types_pb2.LegUsage(role=role, **numbers)  # type: ignore[arg-type]


def test_the_first_legs_hit_is_cached_and_a_transfer_is_not() -> None:
    first = leg(PREFILL, length=100, local=16, external=32, computed=52, run_seconds=0.5)
    second = leg(DECODE, length=101, external=100, computed=1, load_seconds=0.25)
    whole = request_usage([first, second], 100, 8, 0.1)
    assert whole.cached_prompt_tokens == 48
    assert (whole.prefill_seconds, whole.transfer_seconds) == (0.5, 0.25)


def test_a_leg_lost_after_its_tokens_leaves_no_hit_behind() -> None:
    lost = leg(DECODE, generated=37)
    taken_over = leg(DECODE, length=237, external=224, computed=13, load_seconds=0.25)
    whole = request_usage([lost, taken_over], 200, 300, 0.1)
    assert whole.cached_prompt_tokens == 0
    assert whole.transfer_seconds == 0.25


def test_a_leg_lost_before_it_made_anything_was_none() -> None:
    lost = leg(PREFILL)
    second = leg(PREFILL, length=100, local=96, computed=4, queue_seconds=0.5)
    whole = request_usage([lost, second], 100, 8, 0.1)
    assert whole.cached_prompt_tokens == 96
    assert whole.queue_seconds == 0.5


def test_a_resumed_request_has_no_more_cached_than_its_prompt() -> None:
    assert (
        request_usage(
            [leg(DECODE, length=120, local=112, computed=8)], 100, 30, 0.1
        ).cached_prompt_tokens
        == 100
    )


def test_a_lost_leg_is_accounted_for_as_of_its_first_token() -> None:
    begun = types_pb2.Admission(epoch=3, length=100, local=16, external=32, fresh=52)
    leg = lost_leg("boot", "h:1", DECODE, 7, begun)
    assert (leg.length, leg.local, leg.external, leg.computed) == (100, 16, 32, 52)
    assert (leg.generated, leg.lost, leg.worker_id, leg.address) == (7, True, "boot", "h:1")
    assert list(leg.admissions) == [begun]
    assert request_usage([leg], 90, 7, 0.1).cached_prompt_tokens == 48
    assert lost_leg("boot", "h:1", DECODE, 0, None).length == 0
