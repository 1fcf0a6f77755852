"""What the parts of the core refuse, and in which order blocks are reused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.engine.core.blocks import BlockPool, LeadingRun, Naming
from kvrelay.engine.core.external import Query
from kvrelay.engine.core.request import TRANSITIONS, Admission, Finish, Order, Request, RequestState
from kvrelay.engine.core.scheduler import Scheduler
from kvrelay.engine.core.usage import leg_tokens
from kvrelay.errors import Rejected
from tests.accounting.bench import Bench, limits
from tests.engine.fakes import answer, naming


def leading(pool: BlockPool, names: list[bytes], limit: int) -> list[int]:
    """The leading run, without one that was found before."""
    return pool.leading(names, limit, LeadingRun())


def test_an_admission_computes_at_least_one_position() -> None:
    assert Admission(1, 10, 4, 5).fresh == 1
    for numbers in ((10, 4, 6), (10, -4, 6), (10, 4, -1)):
        with pytest.raises(AssertionError):
            Admission(1, *numbers)


@pytest.mark.parametrize("state", RequestState)
@pytest.mark.parametrize("target", RequestState)
def test_a_request_changes_state_by_the_table_only(
    state: RequestState, target: RequestState
) -> None:
    request = Request(Order("r", (1,), 1, 1), [1], state=state)
    if target in TRANSITIONS[state]:
        request.move(target)
        assert request.state is target
    else:
        with pytest.raises(RuntimeError, match="no transition"):
            request.move(target)


def test_blocks_are_reused_nameless_first_then_least_recently_freed() -> None:
    pool = BlockPool(6)
    older, newer = pool.take(2), pool.take(3)
    pool.name(older[0], b"a")
    pool.name(older[1], b"b")
    pool.name(newer[0], b"c")
    pool.drop(older)
    pool.drop(newer)
    order = [newer[1], newer[2], 5, older[1], older[0], newer[0]]
    assert [pool.take(1)[0] for _ in range(6)] == order


def test_a_block_that_is_found_again_is_no_longer_the_next_to_go() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.name(first, b"a")
    pool.name(second, b"b")
    pool.drop([first])
    pool.drop([second])
    pool.hold([first])
    pool.drop([first])
    assert pool.take(2) == [second, first]
    assert leading(pool, [b"a", b"b"], 2) == []


def test_only_the_leading_run_is_a_hit() -> None:
    pool = BlockPool(3)
    for block, name in zip(pool.take(3), (b"a", b"b", b"c"), strict=True):
        pool.name(block, name)
    assert leading(pool, [b"a", b"b", b"c"], 2) == [0, 1]
    assert leading(pool, [b"a", b"other", b"c"], 3) == [0]


def test_a_block_that_gets_another_name_is_not_found_by_the_one_before() -> None:
    pool = BlockPool(2)
    block = pool.take(1)[0]
    pool.name(block, b"a")
    pool.name(block, b"b")
    assert (leading(pool, [b"a"], 1), leading(pool, [b"b"], 1)) == ([], [block])
    assert len(pool.by_name) == 1


def test_a_name_finds_a_block_as_long_as_one_with_the_content_is_left() -> None:
    """Three hold equal content; the name passes on, and the last one keeps it when it is free."""
    pool = BlockPool(4)
    one, two, three = pool.take(3)
    for block in (one, two, three):
        pool.name(block, b"a")
    for block, next_found in ((one, two), (two, three), (three, three)):
        assert leading(pool, [b"a"], 1) == [block]
        pool.drop([block])
        assert leading(pool, [b"a"], 1) == [next_found]
    assert pool.copies == {}
    assert [pool.take(1)[0] for _ in range(4)] == [two, one, 3, three], "the cached one goes last"
    assert leading(pool, [b"a"], 1) == []


def test_content_that_is_computed_again_is_kept_once() -> None:
    """The block that was free loses the name and is the next to be reused."""
    pool = BlockPool(3)
    old, new = pool.take(2)
    pool.name(old, b"a")
    pool.drop([old])
    pool.name(new, b"a")
    assert leading(pool, [b"a"], 1) == [new]
    assert pool.take(1) == [old]


def test_a_copy_can_be_dropped_before_the_first_block() -> None:
    pool = BlockPool(3)
    one, two, three = pool.take(3)
    for block in (one, two, three):
        pool.name(block, b"a")
    pool.drop([two])
    pool.drop([one])
    assert leading(pool, [b"a"], 1) == [three]
    pool.drop([three])
    assert pool.take(3) == [one, two, three]


def test_of_equal_prompts_that_ran_at_once_the_next_finds_all_while_one_is_left() -> None:
    """Eight equal prompts are computed in one step; the first ends; the ninth finds 512 tokens."""
    bench = Bench(limits(400, 16, budget=8 * 520))
    requests = [bench.submit(f"r{n}", range(520), 1 if n == 0 else 40) for n in range(8)]
    plan = bench.step()
    assert [entry.count for entry in plan.entries] == [520] * 8
    assert requests[0].state is RequestState.FINISHED
    for number in range(8, 14):
        request = bench.submit(f"r{number}", range(520), 40)
        bench.step()
        assert request.resident.admission.local == 512
        bench.scheduler.abort(f"r{number - 7}")
    bench.run()


def test_a_pool_refuses_what_its_books_do_not_allow() -> None:
    pool = BlockPool(2)
    with pytest.raises(RuntimeError, match="free"):
        pool.take(3)
    with pytest.raises(RuntimeError, match="has no references"):
        pool.drop([0])


def scheduler() -> Scheduler:
    return Scheduler(limits(4, 4), naming(), lambda _: 0)


def test_what_just_fits_is_served_and_one_more_is_refused() -> None:
    """D5: the last token's KV is never stored, so 10 + 7 tokens fit in 16 positions."""
    scheduler().submit(Order("r", tuple(range(10)), 10, 7))
    with pytest.raises(Rejected, match="max_tokens"):
        scheduler().submit(Order("r", tuple(range(10)), 10, 8))


def test_the_length_of_the_model_binds_too() -> None:
    """There is room for 400 positions, and the model has 20."""
    small = Scheduler(replace(limits(100, 4), max_model_len=20), naming(), lambda _: 0)
    small.submit(Order("fits", (1,), 1, 20))
    with pytest.raises(Rejected, match="max_model_len 20"):
        small.submit(Order("r", (1,), 1, 21))


@pytest.mark.parametrize(
    ("order", "field"),
    [
        (Order("r", (), 0, 1), "prompt"),
        (Order("r", (1,), 2, 1), "prompt"),
        (Order("r", (1,), 1, 0), "max_tokens"),
        (Order("r", (1, 2, 3), 1, 2), "max_tokens"),
    ],
)
def test_nonsense_is_refused_by_name(order: Order, field: str) -> None:
    with pytest.raises(Rejected) as caught:
        scheduler().submit(order)
    assert caught.value.field == field


def test_one_id_is_served_once_at_a_time() -> None:
    one = scheduler()
    one.submit(Order("r", (1,), 1, 1))
    with pytest.raises(Rejected, match="already"):
        one.submit(Order("r", (2,), 1, 1))
    one.abort("r")
    one.submit(Order("r", (2,), 1, 1))


def test_a_step_is_committed_once_and_whole() -> None:
    one = scheduler()
    one.submit(Order("r", (1,), 1, 2))
    plan = one.schedule()
    with pytest.raises(RuntimeError, match=r"before commit"):
        one.schedule()
    with pytest.raises(RuntimeError, match="another size"):
        one.commit(plan, [])
    with pytest.raises(RuntimeError, match="no token"):
        one.commit(plan, [None])
    with pytest.raises(RuntimeError, match="not the last one"):
        one.commit(plan, [5])


def test_a_discarded_step_is_planned_again() -> None:
    one = scheduler()
    one.submit(Order("r", (1, 2, 3), 3, 2))
    first = one.schedule()
    assert one.discard() is first
    assert one.schedule().entries == first.entries


def test_a_step_takes_every_block_it_computes_into_whatever_the_admission_took() -> None:
    """D1 asks the table how long it is; that an admission takes all at once is not relied upon."""
    bench = Bench(limits(8, 4, budget=4))
    request = bench.submit("r", range(15), 3)
    bench.step()
    blocks = request.resident.blocks
    bench.scheduler.pool.drop(blocks[1:])
    del blocks[1:]
    bench.scheduler.limits = limits(8, 4, budget=99)
    bench.bounds = bench.scheduler.limits
    plan = bench.step()
    assert [(entry.start, entry.count) for entry in plan.entries] == [(4, 11)]
    assert len(blocks) == 4
    bench.run()


def test_abort_ends_a_request_in_every_state() -> None:
    bench = Bench(limits(8, 4, budget=4), lambda query: 4 if query.request_id == "loads" else 0)
    bench.submit("runs", range(7), 3)
    bench.submit("loads", range(20, 27), 3)
    bench.submit("waits", range(40, 47), 3)
    bench.step()
    states = [request.state for request in bench.requests]
    assert states == [RequestState.RUNNING, RequestState.LOADING, RequestState.WAITING]
    for request in bench.requests:
        assert bench.scheduler.abort(request.id) is request
        assert (request.state, request.finish) == (RequestState.FINISHED, Finish.ABORT)
        bench.check()
    assert bench.scheduler.abort("runs") is None
    assert len(bench.scheduler.pool.free) < 8, "what is outside holds its blocks"
    bench.end_all()
    assert len(bench.scheduler.pool.free) == 8
    assert bench.scheduler.late_events == 1


def test_the_load_of_a_dead_request_is_not_that_of_its_namesake() -> None:
    """Aborted while loading, submitted again under the same id: the old event is not its own."""
    bench = Bench(limits(8, 4), lambda _: 4)
    bench.submit("r", range(7), 2)
    bench.step()
    bench.scheduler.abort("r")
    again = bench.submit("r", range(20, 27), 2)
    bench.step()
    old, new = bench.loads
    bench.end_load(old)
    assert (again.state, again.resident.computed) == (RequestState.LOADING, 0)
    bench.end_load(new)
    assert (again.state, again.resident.computed) == (RequestState.RUNNING, 4)


def test_a_request_ends_with_the_first_ending_token() -> None:
    bench = Bench(limits(8, 4))
    tokens = answer([1, 2, 3], 6)
    order = Order("r", (1, 2, 3), 3, 6, ending=frozenset({tokens[2]}))
    request = bench.add(order)
    while bench.scheduler.requests:
        bench.step()
    assert (request.tokens[3:], request.finish) == (tokens[:3], Finish.STOP)


def test_the_names_of_a_tenant_are_nobody_elses() -> None:
    """What is found, asked for, loaded and saved is named in the tenant's own chain."""
    plain = naming()
    spaces = {
        b"t1": Naming(b"one", lambda parent, tokens: plain.child(b"1" + parent, tokens)),
        b"t2": Naming(b"two", lambda parent, tokens: plain.child(b"2" + parent, tokens)),
    }
    names = Naming(plain.root, plain.child, lambda space: spaces[space])
    asked: list[Query] = []

    def store(query: Query) -> int:
        asked.append(query)
        return 4

    one = Scheduler(limits(16, 4), names, store)
    for space in (b"t1", b"t2", b""):
        one.submit(
            Order(f"r{space.decode()}", tuple(range(7)), 7, 1, prefill_only=True, space=space)
        )
    plan = one.schedule()
    roots = {b"t1": b"one", b"t2": b"two", b"": b"root"}
    assert [query.space for query in asked] == [load.space for load in plan.loads] == list(roots)
    assert len({query.names[0] for query in asked}) == 3
    one.commit(plan, [])
    for load in plan.loads:
        one.loaded(load.request_id, load.epoch, 0)
    plan = one.schedule()
    assert [entry.start for entry in plan.entries] == [0, 0, 0]
    saves = one.commit(plan, [1, 1, 1]).saves
    assert [save.space for save in saves] == list(roots)
    for save in saves:
        first, last = save.contents
        assert first.parent == roots[save.space]
        assert last.name == names.of(save.space).child(first.name, (4, 5, 6))
        assert first.name == names.of(save.space).child(first.parent, (0, 1, 2, 3))
    assert len({content.name for save in saves for content in save.contents}) == 6
    again = one.submit(Order("again", tuple(range(7)), 7, 1, space=b"t2"))
    one.schedule()
    assert again.resident.admission.local == 4
    assert again.resident.blocks[0] == saves[1].contents[0].block


def test_late_repeated_and_unknown_events_are_counted() -> None:
    bench = Bench(limits(8, 4), lambda _: 4)
    bench.submit("r", range(7), 2)
    bench.step()
    load = bench.loads[0]
    bench.scheduler.loaded("r", load.epoch + 1, 4)
    bench.scheduler.loaded("unknown", load.epoch, 4)
    bench.scheduler.saved("r", load.epoch, 99)
    bench.end_load(load)
    bench.scheduler.loaded("r", load.epoch, 4)
    assert bench.scheduler.late_events == 4
    bench.run()


def test_the_account_of_a_leg_that_was_ended_in_the_middle_of_its_prefill() -> None:
    """What it computed was its prompt and nothing of it was recomputed."""
    bench = Bench(limits(8, 4, budget=4), lambda _: 3)
    request = bench.submit("r", range(14), 5)
    bench.step()
    bench.end_load(bench.loads[0])
    bench.step()
    bench.scheduler.abort("r")
    account = leg_tokens(request)
    assert (account.length, account.local, account.external) == (14, 0, 3)
    assert (account.computed, account.recomputed, account.executed) == (4, 0, 4)
    never = bench.submit("never admitted", range(14), 5)
    bench.scheduler.abort(never.id)
    assert (leg_tokens(never).computed, leg_tokens(never).executed) == (0, 0)


def test_equal_prompts_with_other_answers_share_the_prompt_only() -> None:
    """As with other seeds: a block that was partial when first looked at is not named by that."""
    bench = Bench(limits(12, 4, headroom=0))
    for number in range(6):
        bench.submit(f"r{number}", range(7), 30, salt=number)
    bench.run()
    assert bench.scheduler.preemptions > 2
    assert len({tuple(request.tokens[7:]) for request in bench.requests}) == 6
    assert max(run.admission.local for request in bench.requests for run in request.runs) >= 8


def test_the_account_of_a_leg_that_was_preempted_twice() -> None:
    """Its parts are those of the admission that made the first token; the rest is recomputed."""
    bench = Bench(limits(12, 4, headroom=0))
    for number in range(6):
        bench.submit(f"r{number}", range(7 * number, 7 * number + 7), 30)
    bench.run()
    recomputed = [leg_tokens(request).recomputed for request in bench.requests]
    assert any(recomputed)
    for request, again in zip(bench.requests, recomputed, strict=True):
        account = leg_tokens(request)
        assert (account.length, account.generated) == (7, 30)
        assert account.computed == 7
        assert account.executed == 36 + again


def test_the_last_token_that_is_also_an_ending_one_is_a_stop() -> None:
    order = Order("r", (1, 2), 1, 1, ending=frozenset({2}))
    assert Request.of(order).ends_with(2) is Finish.STOP
