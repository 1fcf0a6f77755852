"""The policy: fits, affinity, balance, ties."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.policies import POLICIES, placement_policy
from kvrelay.errors import Rejected, Unservable
from router.placement.affinity import Affinity
from router.placement.policy import DECODE, PREFILL, LegDemand, Prefix, choose
from router.workers.candidate import Candidate


def candidate(key: str, legs: int = 0, tokens: int = 0, length: int = 4096) -> Candidate:
    return Candidate(key, legs, tokens, length, length)


def picked(
    asked: LegDemand, candidates: list[Candidate], leading: dict[str, int]
) -> tuple[str, int] | None:
    choice = choose(asked, candidates, leading)
    return None if choice is None else (choice.key, choice.hit)


def names(*parts: int) -> tuple[bytes, ...]:
    return tuple(str(part).encode() for part in parts)


def wish(tokens: int, prefix: tuple[bytes, ...] = (), positions: int = 10) -> LegDemand:
    return LegDemand(tokens, positions, Prefix(prefix, 16), PREFILL)


def test_no_worker_and_no_large_enough_worker() -> None:
    assert choose(wish(10), [], {}) is None
    with pytest.raises(Rejected, match="4097 positions, the largest worker has 4096") as caught:
        choose(wish(10, positions=4097), [candidate("a"), candidate("b", length=10)], {})
    assert caught.value.field == "max_tokens"
    assert picked(wish(10, positions=20), [candidate("a", length=10), candidate("b")], {}) == (
        "b",
        0,
    )


def test_a_pool_smaller_than_the_model_allows_is_not_the_fault_of_the_client() -> None:
    small = [replace(candidate("a"), capacity=100), replace(candidate("b"), capacity=200)]
    assert picked(wish(10, positions=150), small, {}) == ("b", 0)
    with pytest.raises(Unservable, match=r"need 201 .* the 4096 .* more than 200: its operator"):
        choose(wish(10, positions=201), small, {})


def test_the_prefix_wins_until_the_queue_costs_more() -> None:
    workers = [candidate("a", 1, 800), candidate("b")]
    assert picked(wish(1600), workers, {"a": 60}) == ("a", 960)
    assert picked(wish(1600), workers, {"a": 40}) == ("b", 0)


def test_a_full_hit_still_computes_one_token() -> None:
    assert picked(wish(32), [candidate("a")], {"a": 2}) == ("a", 31)


def test_leading_counts_in_a_row() -> None:
    affinity = Affinity()
    affinity.record(names(1, 2, 3), "a", 10)
    affinity.record(names(1, 2), "b", 10)
    affinity.record(names(9, 3), "c", 10)
    assert affinity.leading(names(1, 2, 3, 4)) == {"a": 3, "b": 2}
    assert affinity.leading(names(9, 2)) == {"c": 1}
    assert affinity.leading(names(4, 1)) == {}
    assert affinity.leading(()) == {}


def test_a_worker_is_believed_to_hold_what_its_pool_can() -> None:
    affinity = Affinity()
    affinity.record(names(1, 2), "a", 3)
    affinity.record(names(1), "a", 3)
    affinity.record(names(3, 4), "a", 3)
    assert len(affinity) == 3
    assert affinity.leading(names(3, 4)) == {"a": 2}
    assert affinity.leading(names(1, 2)) == {"a": 1}  # the end of a chain goes first
    affinity.forget_half("a")
    assert len(affinity) == 2
    affinity.forget_half("nobody")


def test_beliefs_are_those_of_a_pool_that_evicts() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance, affinity = random.Random(seed), Affinity()
    held: list[bytes] = []
    for _ in range(300):
        chain = names(*(chance.randrange(2) for _ in range(1)), 7, 8, 9)
        tree = tuple(b"/".join(chain[: n + 1]) for n in range(chance.randint(1, 4)))
        affinity.record(tree, "a", 5)
        for name in reversed(tree):
            held = [one for one in held if one != name] + [name]
        held = held[-5:]
        leading = next((i for i, name in enumerate(tree) if name not in held), len(tree))
        assert affinity.leading(tree).get("a", 0) == leading


def test_what_can_be_fetched_evens_the_choice() -> None:
    workers = [candidate("a", 1, 400), candidate("b")]
    asked = LegDemand(1600, 10, Prefix((), 16), PREFILL)
    assert picked(asked, workers, {"a": 60}) == ("a", 960)
    asked = LegDemand(1600, 10, Prefix((), 16), PREFILL, stored=960)
    assert picked(asked, workers, {"a": 60}) == ("b", 0)


def test_a_worker_without_room_is_avoided() -> None:
    full = Candidate("a", 0, 0, 4096, 4096, free=100)
    assert picked(wish(500), [full, candidate("b", 1, 300)], {}) == ("b", 0)
    assert picked(wish(90), [full, candidate("b", 1, 300)], {}) == ("a", 0)


def test_ties_spread_but_a_prefix_stays() -> None:
    workers = [candidate(str(index)) for index in range(8)]
    picks = Counter(
        choice.key for n in range(2000) if (choice := choose(wish(100, names(n)), workers, {}))
    )
    assert len(picks) == 8
    assert min(picks.values()) > 150
    for n in range(50):
        picked = choose(wish(100, names(n)), workers, {})
        others = [worker for worker in workers if picked and worker.key == picked.key]
        kept = random.Random(n).sample(workers, 4)
        assert choose(wish(100, names(n)), [*kept, *others], {}) == picked


@pytest.mark.parametrize("weights", [PREFILL, DECODE])
def test_a_hot_prefix_does_not_bury_one_worker(weights: object) -> None:
    assert weights in (PREFILL, DECODE)
    affinity, load = Affinity(), Counter({str(index): 0 for index in range(4)})
    legs: Counter[str] = Counter()
    hot = names(*range(64))
    for _ in range(400):
        workers = [candidate(key, legs[key], load[key]) for key in load]
        asked = LegDemand(1024, 10, Prefix(hot, 16), PREFILL if weights is PREFILL else DECODE)
        choice = choose(asked, workers, affinity.leading(hot))
        assert choice is not None
        affinity.record(hot, choice.key, 1000)
        load[choice.key] += choice.work
        legs[choice.key] += 1
    assert max(legs.values()) < 1.5 * min(legs.values())


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_picks_one_that_fits(name: str) -> None:
    chosen = placement_policy(name, seed=3)
    assert chosen.choose(wish(10), [], {}) is None
    small, large = candidate("a", length=5), candidate("b")
    for _ in range(20):
        choice = chosen.choose(wish(10, positions=20), [small, large], {"b": 60})
        assert choice is not None
        assert (choice.key, choice.hit) == ("b", 9)
    with pytest.raises(Rejected, match="max_tokens"):
        chosen.choose(wish(10, positions=20), [small], {})


def test_policies_differ_as_their_names_say() -> None:
    workers = [candidate("a", 3, 3000), candidate("b", 1, 100), candidate("c", 2, 900)]
    turns = placement_policy("round-robin")
    picks = [choice.key for _ in range(6) if (choice := turns.choose(wish(10), workers, {}))]
    assert sorted(picks[:3]) == sorted(picks[3:]) == ["a", "b", "c"]
    least = placement_policy("least-loaded").choose(wish(10), workers, {"a": 60})
    assert least is not None
    assert least.key == "b"
    drawn = placement_policy("random", seed=1)
    assert {c.key for _ in range(99) if (c := drawn.choose(wish(9), workers, {}))} == set("abc")


def test_a_prefill_leg_weighs_what_it_computes_and_a_stream_all_it_holds() -> None:
    held = {"a": 60}
    for weights, work in ((PREFILL, 640), (DECODE, 1600)):
        choice = choose(LegDemand(1600, 10, Prefix((), 16), weights), [candidate("a")], held)
        assert choice is not None
        assert choice.work == work
