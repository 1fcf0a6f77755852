"""The usage of a whole request: what a lost leg did not report is not taken from another."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.v1 import types_pb2
from router.generate.usage import hit_of, lost_leg, request_usage

PREFILL, DECODE = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE


def leg(role: types_pb2.Role.ValueType, **numbers: float) -> types_pb2.LegUsage:
    return types_pb2.LegUsage(role=role, **numbers)  # type: ignore[arg-type]


def usage_of(
    legs: Sequence[types_pb2.LegUsage], prompt: int, waited: float = 0.0
) -> types_pb2.Usage:
    return request_usage(legs, prompt, None, 8, waited, 0.1)


def test_the_first_legs_hit_is_cached_and_a_transfer_is_not() -> None:
    first = leg(PREFILL, length=100, local=16, external=32, computed=52, run_seconds=0.5)
    second = leg(DECODE, length=101, external=100, computed=1, load_seconds=0.25)
    whole = usage_of([first, second], 100)
    assert hit_of([first, second]) == 48
    assert (whole.prefill_seconds, whole.transfer_seconds) == (0.5, 0.25)


def test_a_leg_lost_after_its_tokens_leaves_no_hit_behind() -> None:
    lost = lost_leg("boot", "h:1", DECODE, 37, None)
    taken_over = leg(DECODE, length=237, external=224, computed=13, load_seconds=0.25)
    assert hit_of([lost, taken_over]) is None  # its own hits are not known
    assert usage_of([lost, taken_over], 200).transfer_seconds == 0.25


def test_a_leg_lost_before_it_made_anything_was_none() -> None:
    lost = lost_leg("boot", "h:1", PREFILL, 0, None)
    second = leg(PREFILL, length=100, local=96, computed=4, queue_seconds=0.5)
    assert hit_of([lost, second]) == 96
    assert usage_of([lost, second], 100).queue_seconds == 0.5


def test_a_leg_without_an_admission_says_so_and_no_other_does() -> None:
    unknown = lost_leg("boot", "h:1", PREFILL, 0, None)
    wanted = types_pb2.LegUsage(
        worker_id="boot", address="h:1", role=PREFILL, lost=True, admission_unknown=True
    )
    assert unknown == wanted
    assert not lost_leg("boot", "h:1", PREFILL, 0, admitted(100, 48)).admission_unknown


def test_the_queue_of_the_router_is_part_of_the_wait() -> None:
    first = leg(PREFILL, length=100, computed=100, queue_seconds=0.5)
    second = leg(DECODE, length=101, external=100, computed=1, queue_seconds=0.25)
    assert usage_of([first, second], 100, waited=3.0).queue_seconds == 3.5


def admitted(length: int, external: int) -> types_pb2.LegUsage:
    """The account of a leg at its admission."""
    fresh = length - external
    run = types_pb2.Admission(epoch=3, length=length, external=external, fresh=fresh)
    return types_pb2.LegUsage(length=length, external=external, computed=fresh, admissions=[run])


def ran(role: types_pb2.Role.ValueType, *runs: tuple[int, int]) -> types_pb2.LegUsage:
    """A leg that executed these positions, from hit to frontier."""
    admissions = [types_pb2.Admission(external=hit, frontier=end) for hit, end in runs]
    return types_pb2.LegUsage(role=role, length=1, admissions=admissions)


def test_a_lost_leg_has_the_account_of_its_admission() -> None:
    begun = admitted(100, 48)
    begun.external_by_store.add(store="kvrelay://a", tokens=48)
    lost = lost_leg("boot", "h:1", DECODE, 7, begun)
    assert (lost.length, lost.external, lost.computed) == (100, 48, 52)
    assert (lost.generated, lost.lost, lost.worker_id, lost.address) == (7, True, "boot", "h:1")
    assert (lost.executed, lost.admissions[0].frontier) == (52 + 6, 106)
    assert lost.external_by_store == begun.external_by_store
    assert hit_of([lost]) == 48
    assert lost_leg("boot", "h:1", DECODE, 0, None).length == 0


def test_work_of_a_leg_that_was_lost_before_its_first_token_is_no_hit() -> None:
    """The next worker found 896 of 1,600 tokens that the first one had computed and saved."""
    lost = lost_leg("boot", "h:1", PREFILL, 0, admitted(1600, 0))
    assert (lost.computed, lost.executed, lost.admissions[0].frontier) == (1600, 0, 0)
    second = leg(PREFILL, length=1600, external=896, computed=704)
    assert hit_of([lost, second]) == 0


def test_recomputed_counts_positions_that_any_leg_executed_again() -> None:
    def recomputed(*legs: types_pb2.LegUsage) -> int:
        return usage_of(legs, 100).recomputed

    prefill = ran(PREFILL, (32, 100))
    assert recomputed(prefill, ran(DECODE, (100, 140))) == 0  # undisturbed
    assert recomputed(prefill, ran(DECODE, (96, 140))) == 4  # no handoff of the last block
    assert recomputed(ran(DECODE, (0, 50), (16, 120))) == 34  # preempted
    assert recomputed(ran(DECODE, (16, 120), (0, 50))) == 34  # in whatever order
    assert recomputed(prefill, ran(DECODE, (100, 120)), ran(DECODE, (112, 140))) == 8  # migrated
    lost = lost_leg("boot", "h:1", DECODE, 21, admitted(101, 100))
    assert recomputed(prefill, lost, ran(DECODE, (112, 140))) == 9  # it had executed [100, 121)
