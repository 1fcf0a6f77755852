"""The four bugs this project was founded for, each with the numbers it was reported with."""

from __future__ import annotations

import itertools

import pytest

from kvrelay.engine.core.external import Query
from kvrelay.engine.core.request import Admission, Order, Request, RequestState, Residency
from kvrelay.engine.core.usage import leg_tokens
from tests.accounting.bench import Bench, limits
from tests.accounting.toys import BoundaryToy, NanoRequest, NanoToy

# --- preempted, resumed, prefix hit (nano-vllm pull request 211) ----------------------------------


def test_preempted_resumed_prefix_hit_crashes_a_toy_that_reads_the_count_too_early() -> None:
    toy = NanoToy(num_blocks=3, size=4)
    toy.waiting = [NanoRequest([10, 11], 6), NanoRequest([20, 21], 6)]
    with pytest.raises(IndexError):
        toy.run()
    resumed = toy.running[-1]
    assert (len(resumed.tokens), resumed.cached) == (5, 4)


def test_preempted_resumed_prefix_hit() -> None:
    """3 blocks of 4, two requests with a 2-token prompt and 4 tokens to make.

    Ours is not even preempted: the last one waits for the block. One prompt token more, and it is
    preempted, and finds its own block by name.
    """
    bench = Bench(limits(3, 4, headroom=0))
    bench.submit("a", [10, 11], 4)
    bench.submit("b", [20, 21], 4)
    bench.run()
    assert bench.scheduler.preemptions == 0
    bench = Bench(limits(3, 4, headroom=0))
    bench.submit("a", [10, 11], 4)
    second = bench.submit("b", [20, 21, 22], 4)
    bench.run()
    assert bench.scheduler.preemptions == 1
    resumed = second.runs[-1].admission
    assert (resumed.length, resumed.local, resumed.fresh) == (6, 4, 2)
    assert leg_tokens(second).recomputed == 1  # position 4, whose block was not full


@pytest.mark.parametrize(
    ("blocks", "requests"),
    [(3, [(1, 5), (1, 5)]), (2, [(2, 4), (1, 4)]), (2, [(1, 2), (4, 2)])],
)
@pytest.mark.parametrize("headroom", [0, 1, 2])
def test_the_follow_up_in_may_append(
    blocks: int, requests: list[tuple[int, int]], headroom: int
) -> None:
    """Blocks of 4; (prompt, new) as in the follow-up of the report."""
    bench = Bench(limits(blocks, 4, headroom=headroom))
    for number, (prompt, new) in enumerate(requests):
        bench.submit(f"r{number}", [10 * number + token for token in range(prompt)], new)
    bench.run()


PROMPTS = [
    prompt
    for length in (2, 3, 4)
    for prompt in itertools.product((1, 2), repeat=length)
    if (1, 1) in itertools.pairwise(prompt)
]


@pytest.mark.parametrize("first", PROMPTS)
def test_a_stale_name_beside_equal_tokens_of_another_chain(first: tuple[int, ...]) -> None:
    """5 blocks of 2, three prompts that reuse ``1, 1`` at every place of their chains."""
    preemptions = 0
    for second, third in itertools.product(PROMPTS, repeat=2):
        bench = Bench(limits(5, 2, headroom=0))
        for number, prompt in enumerate((first, second, third)):
            bench.submit(f"r{number}", prompt, 4)
        bench.run()
        preemptions += bench.scheduler.preemptions
    assert preemptions > len(PROMPTS)


# --- a lookup remembered (vLLM issue 18955) -------------------------------------------------------


def test_a_lookup_is_not_remembered_from_a_refused_attempt() -> None:
    """6 blocks of 4; three refused attempts see 8 tokens, then half of them is evicted: 4."""
    bench = Bench(limits(6, 4, headroom=0))
    shared = list(range(8))
    bench.submit("first", [*shared, 50], 1)
    bench.run()  # leaves two named blocks behind
    bench.submit("grows", [60 + token for token in range(13)], 5)  # 4 blocks, then a fifth
    bench.step()
    late = bench.submit("late", [*shared, 51, 52, 53, 54, 55], 1)
    while late.state is RequestState.WAITING:
        bench.step()
        bench.end_all()
    seen = [local for request_id, local in bench.queries if request_id == "late"]
    assert seen == [8, 8, 8, 4, 4]  # the last one admitted
    assert late.runs[-1].admission.local == 4
    bench.run()


def test_an_answer_of_the_store_is_not_remembered_either() -> None:
    """The same from outside: 8, 8, 8, then 4, and 4 is what the admission says."""
    answers = iter([8, 8, 8, 4])

    def store(query: Query) -> int:
        return next(answers, 0) if query.request_id == "late" else 0

    bench = Bench(limits(6, 4, headroom=0), store)
    bench.submit("holds", [60 + token for token in range(17)], 4)
    bench.step()
    late = bench.submit("late", list(range(13)), 1)
    for _ in range(3):
        bench.step()
        assert late.residency is None
    bench.end_all()
    bench.step()
    assert late.resident.admission == Admission(2, 13, 0, 4)
    assert len(bench.loads[0].blocks) == 1
    bench.run()


# --- two ages in one subtraction (vLLM pull request 36752) ----------------------------------------


def test_two_admissions_are_never_mixed() -> None:
    """400 tokens, blocks of 16, budget 64; the store answers 64, and 192 after a preemption."""

    def store(query: Query) -> int:
        if query.request_id != "long":
            return 0
        return 192 if bench.scheduler.preemptions else 64

    bench = Bench(limits(26, 16, budget=64, headroom=0), store)
    short = bench.submit("short", range(500, 514), 7)
    bench.step()
    long = bench.submit("long", range(400), 1)
    bench.run()
    assert bench.scheduler.preemptions == 1
    first, second = long.runs
    assert (first.admission.local, first.admission.external) == (0, 64)
    assert 64 < first.frontier < 400, "preempted in the middle of its prefill"
    assert second.admission.external == 192
    assert min(second.admission.local, second.admission.fresh, second.executed) > 0
    account = leg_tokens(long)
    assert (account.local, account.external) == (0, 64), "what existed before the request came"
    assert account.local + account.external + account.computed == 400
    assert account.executed == first.executed + second.executed
    assert account.recomputed == 0, "the second residency begins after the first one's work"
    assert leg_tokens(short).generated == 7


# --- the boundary (nano-vllm issue 240) -----------------------------------------------------------


def corrupted(rule: int, appended: bool, length: int, size: int) -> list[int]:
    toy = BoundaryToy(rule, size, range(length), appended)
    for token in range(90, 90 + 2 * size):
        toy.decode(token)
        if toy.wrong():
            return toy.wrong()
    return []


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_which_boundary_is_right_depends_on_when_it_is_asked(length: int, size: int) -> None:
    assert corrupted(1, True, length, size) == []
    assert corrupted(0, False, length, size) == []
    assert corrupted(0, True, length, size)
    assert corrupted(1, False, length, size)


def test_what_the_wrong_boundary_corrupts() -> None:
    """A prompt of one block of 4: position 0 is overwritten by 4, which is outside the table.

    A prompt of 3: its last slot is never written, the token went into a block opened too early.
    """
    assert corrupted(0, True, 4, 4) == [0, 4]
    assert corrupted(0, True, 3, 4) == [3]


def test_either_boundary_fails_once_a_step_computes_more_than_one_position() -> None:
    """From K computed, n more: a rule on the length opens a block too few or one too many."""
    for rule in (0, 1):
        wrong = [
            (computed, length)
            for computed in range(1, 9)
            for length in range(computed + 1, computed + 5)
            if -(-computed // 4) + (length % 4 == rule) != -(-length // 4)
        ]
        assert any(length > computed + 1 for computed, length in wrong), rule


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
def test_ours_asks_the_table_how_long_it_is(size: int) -> None:
    """D1 for every K and n, whatever the length is and whenever it is asked."""
    for computed, count, held in itertools.product(range(3 * size), range(1, 3 * size), range(3)):
        request = Request.of(Order("r", tuple(range(computed + count)), 1, 1000))
        request.residency = Residency(Admission(1, computed + count, 0, 0), [0] * held, computed)
        slots = (held + request.need(count, size)) * size
        assert slots - size < computed + count <= slots


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("budget", [1, 2, 3, 64])
def test_ours_has_neither_boundary(length: int, size: int, budget: int) -> None:
    bench = Bench(limits(20, size, budget=budget))
    bench.submit("r", range(length), 2 * size + 1)
    bench.run()
