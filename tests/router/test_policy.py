"""The policy: fits, affinity, balance, ties."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from common.errors import Rejected
from router.policy import DECODE, PREFILL, Affinity, Candidate, Choice, Prefix, Wish, choose


def candidate(key: str, legs: int = 0, tokens: int = 0, length: int = 4096) -> Candidate:
    return Candidate(key, legs, tokens, length, length)


def names(*parts: int) -> tuple[bytes, ...]:
    return tuple(str(part).encode() for part in parts)


def wish(tokens: int, prefix: tuple[bytes, ...] = (), positions: int = 10) -> Wish:
    return Wish(tokens, positions, Prefix(prefix, 16), PREFILL)


def test_nobody_and_nobody_large_enough() -> None:
    assert choose(wish(10), [], {}) is None
    with pytest.raises(Rejected, match="4097 positions, the largest worker has 4096") as caught:
        choose(wish(10, positions=4097), [candidate("a"), candidate("b", length=10)], {})
    assert caught.value.field == "max_tokens"
    assert choose(wish(10, positions=20), [candidate("a", length=10), candidate("b")], {}) == (
        Choice("b", 0)
    )


def test_the_prefix_wins_until_the_queue_costs_more() -> None:
    workers = [candidate("a", 1, 800), candidate("b")]
    assert choose(wish(1600), workers, {"a": 60}) == Choice("a", 960)
    assert choose(wish(1600), workers, {"a": 40}) == Choice("b", 0)


def test_a_full_hit_still_computes_one_token() -> None:
    assert choose(wish(32), [candidate("a")], {"a": 2}) == Choice("a", 31)


def test_leading_counts_in_a_row() -> None:
    affinity = Affinity()
    affinity.record(names(1, 2, 3), "a")
    affinity.record(names(1, 2), "b")
    affinity.record(names(9, 3), "c")
    assert affinity.leading(names(1, 2, 3, 4)) == {"a": 3, "b": 2}
    assert affinity.leading(names(9, 2)) == {"c": 1}
    assert affinity.leading(names(4, 1)) == {}
    assert affinity.leading(()) == {}


def test_affinity_is_bounded_and_forgets_the_oldest() -> None:
    affinity = Affinity(capacity=3)
    affinity.record(names(1, 2), "a")
    affinity.record(names(1), "a")
    affinity.record(names(3, 4), "a")
    assert len(affinity) == 3
    assert affinity.leading(names(1)) == {"a": 1}
    assert affinity.leading(names(2)) == {}
    for key in "bcdefg":
        affinity.record(names(1), key)
    assert set(affinity.leading(names(1))) == set("defg")


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
        asked = Wish(1024, 10, Prefix(hot, 16), PREFILL if weights is PREFILL else DECODE)
        choice = choose(asked, workers, affinity.leading(hot))
        assert choice is not None
        affinity.record(hot, choice.key)
        load[choice.key] += 1024
        legs[choice.key] += 1
    assert max(legs.values()) < 1.5 * min(legs.values())
