"""I8 and fair steps: nobody waits for ever, nobody overtakes, nobody starves."""

from __future__ import annotations

import random

import pytest

from kvrelay.engine.core.external import Query
from kvrelay.engine.core.request import Request, RequestState
from kvrelay.engine.core.usage import leg_tokens
from tests.accounting.bench import Bench, limits


@pytest.mark.parametrize("first", [0, 1])
def test_two_loads_that_could_wedge_each_other(first: int) -> None:
    """8 blocks, two requests of 5: a load takes all its blocks at once or none."""
    bench = Bench(limits(8, 4, headroom=0), lambda query: 99)
    one = bench.submit("one", range(18), 3)
    two = bench.submit("two", range(50, 68), 3)
    bench.step()
    assert (one.state, two.state) == (RequestState.LOADING, RequestState.WAITING)
    assert two.residency is None
    bench.submit("small", range(90, 94), 2)
    bench.step()
    assert len(bench.loads) == 1, "the small one does not pass the second"
    bench.run()


def test_a_running_request_waits_for_the_blocks_of_a_load_and_gets_them() -> None:
    """The last runner needs a block, a load that cannot be cancelled has the rest."""
    bench = Bench(limits(4, 4, headroom=0), lambda query: 99 if query.request_id == "load" else 0)
    runs = bench.submit("runs", range(7), 8)
    load = bench.submit("load", range(20, 27), 2)
    while runs.length < 9:
        bench.step()
    for _ in range(3):
        assert not bench.step().entries, "no block, no step; and nobody is preempted for itself"
    assert (bench.scheduler.preemptions, load.state) == (1, RequestState.WAITING)
    bench.end_load(bench.loads[0])
    bench.step()
    assert (runs.length, load.state) == (10, RequestState.WAITING)
    bench.run()


def test_the_last_running_request_waits_if_only_older_ones_load() -> None:
    bench = Bench(
        limits(4, 4, headroom=0),
        lambda query: 99 if query.request_id == "load" else 0,
        cancels=lambda _: True,
    )
    load = bench.submit("load", range(20, 27), 2)
    runs = bench.submit("runs", range(7), 8)
    while runs.length < 9:
        bench.step()
    for _ in range(3):
        assert not bench.step().entries
    assert (bench.scheduler.preemptions, load.state) == (0, RequestState.LOADING)
    bench.run()


@pytest.mark.parametrize(("size", "given_up"), [(5, 1), (2, 2)])
def test_cancelled_loads_return_their_blocks_in_the_same_step(size: int, given_up: int) -> None:
    """Two that run lack a block each: one load of two blocks gives way, or two of one block."""
    held = 1 + size // 4
    bench = Bench(
        limits(4 + 2 * held, 4, headroom=0),
        lambda query: 99 if query.request_id.startswith("load") else 0,
        cancels=lambda _: True,
    )
    runs = [bench.submit(f"run{n}", [n, *range(6)], 8) for n in range(2)]
    loads = [bench.submit(f"load{n}", [20 + n, *range(size - 1)], 2) for n in range(2)]
    while runs[0].length < 9:
        bench.step()
    plan = bench.step()
    assert list(plan.preempted) == loads[::-1][:given_up]
    assert [entry.request for entry in plan.entries] == runs
    assert [load.request_id for load in bench.loads] == ["load0", "load1"][: 2 - given_up]
    bench.run()


def test_an_aborted_request_returns_the_blocks_of_a_load_that_can_be_cancelled() -> None:
    bench = Bench(limits(4, 4), lambda _: 99, cancels=lambda load: load.request_id == "cancels")
    for request_id, held in (("cancels", 0), ("runs on", 2)):
        bench.submit(request_id, range(8), 2)
        bench.step()
        bench.scheduler.abort(request_id)
        bench.check()
        assert sum(bench.scheduler.pool.references) == held
    bench.end_load(bench.loads[0])
    bench.check_end()


@pytest.mark.parametrize(("cancels", "epoch"), [(True, 4), (False, 3)])
def test_a_load_begins_anew_at_once_after_one_that_was_cancelled(cancels: bool, epoch: int) -> None:
    """While one that cannot be cancelled is open, the next lookup waits for its end."""
    bench = Bench(
        limits(8, 4, headroom=0),
        lambda query: 99 if query.request_id == "load" else 0,
        cancels=lambda _: cancels,
    )
    bench.submit("first", range(8), 9)
    second = bench.submit("second", range(20, 25), 4)
    bench.submit("load", range(40, 53), 2)
    while second.state is not RequestState.FINISHED:
        bench.step()
    bench.scheduler.abort("first")
    bench.step()
    assert [load.epoch for load in bench.loads] == [epoch]
    bench.run()


@pytest.mark.parametrize("seqs", [3, 16])
@pytest.mark.parametrize("blocks", [8, 12, 16])
@pytest.mark.parametrize("delay", [0, 1, 7])
def test_who_is_loaded_comes_before_those_that_came_while_it_was_loading(
    seqs: int, blocks: int, delay: int
) -> None:
    """Small ones keep coming and start at once; they give way to the old one, never it to them."""
    bench = Bench(
        limits(blocks, 1, seqs=seqs), lambda query: 99 if query.request_id == "old" else 0
    )
    bench.submit("before", [9, 9], 4)
    bench.step()
    old = bench.submit("old", range(5), blocks - 5)
    begun: dict[int, int] = {}
    while old.state is not RequestState.FINISHED:
        assert bench.steps < 100
        stream(bench, 4)
        bench.step()
        for load in list(bench.loads):
            if bench.steps - begun.setdefault(load.epoch, bench.steps) >= delay:
                bench.end_load(load)
        running = [request.arrival for request in bench.scheduler.running]
        assert running == sorted(running)
        for save in list(bench.saves):
            bench.end_save(save)
    assert len(old.runs) <= 2, "preempted by the one before it, if at all"
    bench.run()


@pytest.mark.parametrize(("later", "stands"), [(1, 1), (5, 1), (1, 5), (2, 5), (1, 20), (20, 20)])
@pytest.mark.parametrize(("blocks", "size", "seqs"), [(12, 4, 16), (12, 1, 16), (40, 4, 1)])
@pytest.mark.parametrize("new", [4, 9])
def test_who_must_ask_later_again_and_again_is_not_passed_over_for_ever(
    later: int, stands: int, blocks: int, size: int, seqs: int, new: int
) -> None:
    """An answer stands for a while, then it is "later" again: those who pass leave the room."""

    def store(query: Query) -> int | None:
        asks_anew = bench.steps % (later + stands) < later
        return None if query.request_id == "old" and asks_anew else 0

    bench = Bench(limits(blocks, size, seqs=seqs), store)
    stream(bench, new)
    bench.step()
    old = bench.submit("old", range(blocks * size * 2 // 3), 3)
    while old.state is RequestState.WAITING:
        assert bench.steps < 200
        stream(bench, new)
        bench.step()
        bench.end_all()
    bench.run()


def test_who_is_passed_over_keeps_the_blocks_that_were_found_for_it() -> None:
    """6 blocks of 4, three of them hold its prefix: three are left for it, and none for another."""
    bench = Bench(limits(6, 4, headroom=0), lambda query: None if query.request_id == "late" else 0)
    shared = list(range(12))
    bench.submit("first", [*shared, 50], 1)
    bench.run()
    late = bench.submit("late", [*shared, *range(60, 69)], 1)
    other = bench.submit("other", [70, 71], 2)
    bench.step()
    assert (late.state, other.state) == (RequestState.WAITING, RequestState.WAITING)
    bench.scheduler.abort("late")
    bench.run()


@pytest.mark.parametrize(("blocks", "passes"), [(7, False), (8, True)])
@pytest.mark.parametrize(("first", "young"), [((1, 4), (1, 1)), ((1, 1), (1, 4))])
def test_who_passes_leaves_room_for_all_that_everybody_may_become(
    blocks: int, passes: bool, first: tuple[int, int], young: tuple[int, int]
) -> None:
    """Blocks of 1: 4 and 1 in the end for two of them, 3 for the one that must ask later."""
    bench = Bench(
        limits(blocks, 1, headroom=0), lambda query: None if query.request_id == "late" else 0
    )
    bench.submit("first", range(first[0]), first[1])
    bench.submit("late", range(10, 13), 1)
    other = bench.submit("young", range(20, 20 + young[0]), young[1])
    bench.begin()
    assert (other.residency is not None) is passes


@pytest.mark.parametrize(("blocks", "admitted"), [(9, False), (10, True)])
def test_the_watermark_counts_everybody_who_is_here(blocks: int, admitted: bool) -> None:
    """Two blocks of 1 for the one that runs and holds 3, two for the one that loads and holds 2."""
    bench = Bench(
        limits(blocks, 1, headroom=2), lambda query: 99 if query.request_id == "loads" else 0
    )
    bench.submit("runs", [1], 5)
    bench.step()
    loads = bench.submit("loads", [2, 3], 1)
    bench.step()
    newcomer = bench.submit("new", [4], 1)
    bench.begin()
    assert loads.state is RequestState.LOADING
    assert (newcomer.residency is not None) is admitted


def test_two_that_are_preempted_wait_in_the_order_they_came() -> None:
    """The third loads and is the newest, so it goes first; the second follows and is before it."""
    bench = Bench(limits(10, 1, headroom=0), lambda query: 99 if query.request_id == "third" else 0)
    bench.submit("first", [1], 8)
    second = bench.submit("second", [2, 3], 5)
    third = bench.submit("third", [4, 5, 6], 3)
    while not bench.scheduler.preemptions:
        bench.step()
    assert (second.state, third.state) == (RequestState.RUNNING, RequestState.WAITING)
    assert bench.loads, "the load still holds its blocks"
    while bench.scheduler.preemptions < 2:
        bench.step()
    assert list(bench.scheduler.waiting) == [second, third]
    bench.run()


def test_a_preempted_request_queues_behind_an_older_one_whose_lookup_is_late() -> None:
    """Two ask later and a third passes both; the first then grows and preempts the third."""
    late = {"first", "second"}
    bench = Bench(limits(5, 1, headroom=0), lambda query: None if query.request_id in late else 0)
    first = bench.submit("first", [1, 2], 3)
    second = bench.submit("second", [3, 4, 5], 1)
    third = bench.submit("third", [6], 3)
    bench.step()
    assert list(bench.scheduler.running) == [third]
    late.remove("first")
    bench.step()
    assert list(bench.scheduler.running) == [first, third]
    while not bench.scheduler.preemptions:
        bench.step()
    assert list(bench.scheduler.running) == [first]
    assert list(bench.scheduler.waiting) == [second, third]
    late.clear()
    bench.run()


@pytest.mark.parametrize("cancels", [False, True])
@pytest.mark.parametrize("delay", [0, 40, 150, 400])
def test_no_older_request_gives_way_to_newer_ones_that_load(delay: int, cancels: bool) -> None:
    """Four old answers fill the pool as they grow; six newer requests load slowly beside them.

    The newest residents give way first, one load a step, and none loads twice at once. If loads can
    be cancelled, the old ones never wait: as many steps as without the newer ones.
    """
    bench = Bench(
        limits(100, 16),
        lambda query: 99 if query.request_id.startswith("young") else 0,
        cancels=lambda _: cancels,
    )
    olds = [bench.submit(f"old{n}", [n, *range(63)], 330) for n in range(4)]
    for _ in range(20):
        bench.step()
        bench.end_all()
    young = [bench.submit(f"young{n}", [20 + n, *range(111)], 20) for n in range(6)]
    begun: dict[int, int] = {}
    given_up: list[Request] = []
    while bench.scheduler.requests:
        assert bench.steps < 3000
        if cancels and bench.steps < 330:
            assert all(request.length == 64 + bench.steps for request in olds), "an old one waits"
        plan = bench.step()  # the bench checks that none newer than a preempted one stays
        given_up += [request for request in plan.preempted if request.given_up]
        if any(request in young for request in plan.preempted):
            assert len(plan.preempted) == 1
        assert len({load.request_id for load in bench.loads}) == len(bench.loads)
        for save in list(bench.saves):
            bench.end_save(save)
        for load in list(bench.loads):
            if bench.steps - begun.setdefault(load.epoch, bench.steps) >= delay:
                bench.end_load(load)
    bench.check_end()
    seen = 1 if cancels and delay == 150 else 6  # the other loads end before they are in the way
    assert given_up[:seen] == (young[::-1][:seen] if delay >= 150 else [])
    if delay < 150:
        assert all(len(request.runs) == 1 for request in olds)


def test_a_running_request_goes_on_while_an_older_one_waits_for_blocks() -> None:
    """The first lacks a block, all others are being loaded or in use; the second has room left."""
    bench = Bench(limits(8, 4, headroom=0), lambda query: 99 if query.request_id == "load" else 0)
    first = bench.submit("first", range(8), 9)
    second = bench.submit("second", range(20, 25), 9)
    bench.submit("load", range(40, 56), 2)
    bench.step()
    assert len(bench.scheduler.pool.free) == 0
    plan = bench.step()
    assert [request.id for request in plan.preempted] == ["load"]
    assert [entry.request for entry in plan.entries] == [second]
    assert first.length == 9
    bench.run()


def test_the_first_admission_is_that_of_the_load_that_was_not_given_up() -> None:
    """Preempted while it loads, a request has computed nothing: what it then finds are hits."""
    bench = Bench(limits(8, 4, headroom=0), lambda query: 99 if query.request_id == "load" else 0)
    bench.submit("first", range(8), 9)
    bench.submit("second", range(20, 25), 9)
    load = bench.submit("load", range(40, 53), 2)
    bench.step()
    bench.step()
    assert (load.state, load.runs, load.given_up) == (RequestState.WAITING, [], 3)
    late = bench.scheduler.late_events
    bench.end_load(bench.loads[0])
    assert bench.scheduler.late_events == late + 1
    bench.run()
    account = leg_tokens(load)
    assert (account.local, account.external, account.computed) == (0, 12, 1)
    assert account.recomputed == 0


def stream(bench: Bench, new: int) -> None:
    """Small requests, so that always some wait."""
    while len(bench.scheduler.waiting) < 4:
        number = len(bench.requests)
        bench.submit(f"young{number}", [number % 90, number // 90], new)


@pytest.mark.parametrize("valid", [-1, 0, 1])
def test_a_failed_load_asks_at_most_once_more(valid: int) -> None:
    """Preempted again and again over a store that promises all and hardly delivers."""
    bench = Bench(limits(12, 4, headroom=0), lambda _: 99, valid=lambda load: valid)
    for number in range(6):
        bench.submit(f"r{number}", range(10 * number, 10 * number + 7), 30)
    while bench.scheduler.requests:
        questions = len(bench.queries)
        bench.step()
        for request_id, _ in bench.queries[questions:]:
            assert [load.request_id for load in bench.started].count(request_id) <= 2
        bench.end_all()
    bench.check_end()
    loads = [load.request_id for load in bench.started]
    admissions = [len(request.runs) for request in bench.requests]
    assert max(loads.count(request.id) for request in bench.requests) == 2
    assert max(admissions) >= 3, "the case has a third admission, which must not ask"


def test_decode_is_not_starved_by_prefills() -> None:
    """Three decode; long prompts keep coming; each of the three makes a token every step."""
    bench = Bench(limits(400, 4, budget=8))
    decoding = [bench.submit(f"d{n}", [n], 60) for n in range(3)]
    bench.step()
    for number in range(50):
        bench.submit(f"long{number}", range(100), 1)
        before = [request.length for request in decoding]
        bench.step()
        assert [request.length for request in decoding] == [length + 1 for length in before]
    assert any(request.state is RequestState.FINISHED for request in bench.requests), (
        "prefills go on too"
    )
    bench.run()


def test_a_decode_that_joins_a_long_prefill_makes_a_token_every_step() -> None:
    """It was loaded, so it came without budget; the prefill before it gets what it leaves."""
    bench = Bench(limits(40, 4, budget=4), lambda query: 99 if query.request_id == "d" else 0)
    long = bench.submit("long", range(40), 1)
    bench.step()
    decoding = bench.resume("d", [1, 2, 3], made=1, new=9)
    bench.step()
    bench.end_load(bench.loads[0])
    for made in range(2, 6):
        plan = bench.step()
        assert [(entry.request, entry.count) for entry in plan.entries] == [
            (decoding, 1),
            (long, 3),
        ]
        assert decoding.length == 3 + made
    bench.run()


def test_a_prefill_is_not_starved_by_decoders() -> None:
    """As long as the budget is at least the number of residents, the oldest always moves."""
    bench = Bench(limits(400, 4, seqs=4, budget=4))
    first = bench.submit("first", range(40), 1)
    number = 0
    while first.state is not RequestState.FINISHED:
        number += 1
        bench.submit(f"d{number}", [number % 90], 9)
        bench.step()
        assert bench.steps <= 40 + 1
    bench.run()


def test_a_long_prefill_comes_before_a_short_one_that_came_later() -> None:
    """The short one was loaded but for two positions: it gets what the long one leaves."""
    bench = Bench(limits(40, 4, budget=8), lambda query: 7 if query.request_id == "short" else 0)
    long = bench.submit("long", range(40), 1)
    bench.step()
    bench.submit("short", range(50, 59), 1)
    bench.step()
    bench.end_all()
    plan = bench.step()
    assert [(entry.request, entry.count) for entry in plan.entries] == [(long, 8)]
    bench.run()


def test_the_budget_binds_decode() -> None:
    bench = Bench(limits(40, 4, budget=2))
    requests = [bench.submit(f"r{n}", [n], 10) for n in range(5)]
    while bench.scheduler.requests:
        plan = bench.step()
        assert sum(entry.count for entry in plan.entries) <= 2
        lengths = [request.length for request in requests]
        assert lengths == sorted(lengths, reverse=True), "first come, first served"


@pytest.mark.parametrize("seqs", [1, 2, 3])
def test_max_num_seqs_bounds_running_and_loading(seqs: int) -> None:
    answers = random.Random(seqs)
    bench = Bench(limits(60, 4, seqs=seqs), lambda _: answers.choice([0, 99]))
    for number in range(10):
        bench.submit(f"r{number}", range(number, number + 9), 4)
    most = 0
    while bench.scheduler.requests:
        bench.step()
        most = max(most, len(bench.scheduler.running) + bench.scheduler.loading)
        if len(bench.loads) == seqs or bench.steps % 7 == 0:
            bench.end_all()
    assert most == seqs


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    """It needs the whole pool; small ones arrive each step; it is served before those after it."""
    bench = Bench(limits(10, 4, budget=16))
    for number in range(5):
        bench.submit(f"before{number}", [number, 1], 6)
    bench.step()
    large = bench.submit("large", range(36), 4)
    after: list[Request] = []
    while large.state is not RequestState.FINISHED:
        after.append(bench.submit(f"after{len(after)}", [len(after) % 90, 2], 3))
        bench.step()
        bench.end_all()
        assert bench.steps < 40
        if large.state is RequestState.WAITING:
            assert all(request.state is RequestState.WAITING for request in after)
    bench.run()


def test_preempted_requests_come_back_in_their_order() -> None:
    bench = Bench(limits(6, 4, headroom=0))
    requests = [bench.submit(f"r{n}", range(10 * n, 10 * n + 4), 12) for n in range(3)]
    order: list[str] = []
    while bench.scheduler.requests:
        standing = [
            request.id for request in requests if request.state is not RequestState.FINISHED
        ]
        queue = [request.id for request in (*bench.scheduler.running, *bench.scheduler.waiting)]
        assert queue == standing
        bench.step()
        bench.end_all()
        order += [
            request.id
            for request in requests
            if request.state is RequestState.FINISHED and request.id not in order
        ]
    assert bench.scheduler.preemptions >= 2
    assert order == ["r0", "r1", "r2"]


def computed(blocks: int, loads: list[tuple[int, int]], headroom: int) -> tuple[int, int, int]:
    """Positions computed, steps, preemptions of a load of (prompt, new) pairs."""
    bench = Bench(limits(blocks, 4, headroom=headroom))
    for number, (prompt, new) in enumerate(loads):
        bench.submit(f"r{number}", range(97 * number, 97 * number + prompt), new)
    bench.run()
    assert bench.runner.executed_positions >= sum(prompt + new - 1 for prompt, new in loads)
    recomputed = sum(leg_tokens(request).recomputed for request in bench.requests)
    assert bench.runner.executed_positions == recomputed + sum(
        prompt + new - 1 for prompt, new in loads
    )
    return bench.runner.executed_positions, bench.steps, bench.scheduler.preemptions


def test_the_watermark_keeps_preempted_requests_from_thrashing() -> None:
    """6 requests of 7 + 30 tokens in 12 blocks of 4; one process computes 216 positions."""
    by_headroom = [computed(12, [(7, 30)] * 6, headroom)[0] for headroom in range(3)]
    assert by_headroom == [312, 286, 260]
