"""Each invariant broken on purpose is found, by its number and with the request it is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvrelay.engine.core.audit import audit
from kvrelay.engine.core.request import Order, RequestState, Residency
from kvrelay.engine.core.scheduler import Scheduler
from tests.accounting.bench import Bench, limits


@pytest.fixture
def bench() -> Bench:
    """One runs with two named blocks, one loads, one waits; all is well."""
    bench = Bench(limits(12, 4, seqs=2), lambda query: 99 if query.request_id == "loads" else 0)
    for first, name in enumerate(("runs", "loads", "waits")):
        bench.submit(name, range(20 * first, 20 * first + 9), 8)
        bench.step()
    states = [request.state for request in bench.requests]
    assert states == [RequestState.RUNNING, RequestState.LOADING, RequestState.WAITING]
    assert audit(bench.scheduler) == []
    return bench


def residency(scheduler: Scheduler, name: str) -> Residency:
    return scheduler.requests[name].resident


def free_a_held_block(scheduler: Scheduler) -> None:
    scheduler.pool.free[residency(scheduler, "runs").blocks[0]] = None


def lose_a_free_block(scheduler: Scheduler) -> None:
    scheduler.pool.free.popitem()


def free_another_block(scheduler: Scheduler) -> None:
    """As many are free as have no holder."""
    free_a_held_block(scheduler)
    scheduler.pool.free.popitem(last=False)


def count_no_holder_that_saves(scheduler: Scheduler) -> None:
    assert scheduler.saves
    for blocks in scheduler.saves.values():
        for block in blocks:
            scheduler.pool.references[block] -= 1


def count_a_holder_too_many(scheduler: Scheduler) -> None:
    scheduler.pool.references[residency(scheduler, "runs").blocks[0]] += 1


def count_a_holder_too_few(scheduler: Scheduler) -> None:
    scheduler.pool.references[residency(scheduler, "loads").blocks[-1]] -= 1


def put_a_block_in_twice(scheduler: Scheduler) -> None:
    blocks = residency(scheduler, "runs").blocks
    scheduler.pool.references[blocks[1]] -= 1
    scheduler.pool.references[blocks[0]] += 1
    blocks[1] = blocks[0]


def find_by_a_name_not_carried(scheduler: Scheduler) -> None:
    scheduler.pool.by_name[b"other"] = 0


def carry_a_name_not_found(scheduler: Scheduler) -> None:
    scheduler.pool.names[residency(scheduler, "runs").blocks[-1]] = b"other"


def name_a_block_being_written(scheduler: Scheduler) -> None:
    scheduler.pool.name(next(iter(scheduler.loads.values()))[0], b"early")


def hold_what_is_no_block(scheduler: Scheduler) -> None:
    residency(scheduler, "runs").blocks[0] = 9999


def load_into_what_is_no_block(scheduler: Scheduler) -> None:
    scheduler.loads[next(iter(scheduler.loads))] = (-1,)


def find_what_is_no_block(scheduler: Scheduler) -> None:
    scheduler.pool.by_name[b"other"] = 12


def free_what_is_no_block(scheduler: Scheduler) -> None:
    scheduler.pool.free[12] = None


def name_before_it_is_full(scheduler: Scheduler) -> None:
    scheduler.pool.name(residency(scheduler, "runs").blocks[-1], b"early")


def lose_the_name_of_a_full_block(scheduler: Scheduler) -> None:
    scheduler.pool._forget(residency(scheduler, "runs").blocks[0])


def list_a_copy_without_the_name(scheduler: Scheduler) -> None:
    pool, blocks = scheduler.pool, residency(scheduler, "runs").blocks
    pool.copies[pool.names[blocks[0]] or b""] = [blocks[-1]]


def free_a_copy(scheduler: Scheduler) -> None:
    pool, first = scheduler.pool, residency(scheduler, "runs").blocks[0]
    name, copy = pool.names[first], next(iter(pool.free))
    assert name is not None
    pool.names[copy] = name
    pool.copies[name] = [copy]


def free_what_is_found_among_copies(scheduler: Scheduler) -> None:
    pool = scheduler.pool
    block, _ = pool.free.popitem()
    pool.hold([block])
    pool.name(block, b"other")
    pool.drop([block])
    pool.copies[b"other"] = []


def copy_without_a_first(scheduler: Scheduler) -> None:
    scheduler.pool.copies[b"other"] = []


def copy_what_is_no_block(scheduler: Scheduler) -> None:
    scheduler.pool.copies[b"other"] = [12]


def swap_two_names(scheduler: Scheduler) -> None:
    pool, (one, two, *_) = scheduler.pool, residency(scheduler, "runs").blocks
    pool.names[one], pool.names[two] = pool.names[two], pool.names[one]
    pool.by_name = {name: block for block, name in enumerate(pool.names) if name is not None}


def write_a_block_of_another(scheduler: Scheduler) -> None:
    """Every reference is right, and one overwrites the other."""
    runs, other = residency(scheduler, "runs"), residency(scheduler, "loads")
    for block in other.blocks[1:]:
        scheduler.pool.drop([block])
    del other.blocks[1:]
    other.blocks.append(runs.blocks[-1])
    scheduler.pool.hold(other.blocks[1:])


def begin_a_load_too_far(scheduler: Scheduler) -> None:
    residency(scheduler, "loads").computed = 4


def compute_beyond_the_blocks(scheduler: Scheduler) -> None:
    residency(scheduler, "loads").computed = 99


def leave_no_work(scheduler: Scheduler) -> None:
    residency(scheduler, "runs").computed = scheduler.requests["runs"].length


def reside_while_waiting(scheduler: Scheduler) -> None:
    scheduler.requests["waits"].residency = replace(residency(scheduler, "runs"), blocks=[])


def run_without_residing(scheduler: Scheduler) -> None:
    blocks = residency(scheduler, "runs").blocks
    scheduler.requests["runs"].residency = None
    scheduler.pool.drop(blocks)


def fall_behind_the_admission(scheduler: Scheduler) -> None:
    here = residency(scheduler, "runs")
    here.admission = replace(here.admission, local=8)
    here.computed = 4


def wait_and_run(scheduler: Scheduler) -> None:
    scheduler.waiting.append(scheduler.requests["runs"])


def run_and_wait(scheduler: Scheduler) -> None:
    scheduler.running.append(scheduler.requests["waits"])


def leave_the_queue(scheduler: Scheduler) -> None:
    scheduler.waiting.clear()


def wait_before_an_older_one(scheduler: Scheduler) -> None:
    scheduler.submit(Order("younger", (1,), 1, 1))
    scheduler.waiting.reverse()


def load_without_a_load(scheduler: Scheduler) -> None:
    for blocks in scheduler.loads.values():
        scheduler.pool.drop(blocks)
    scheduler.loads.clear()


@pytest.mark.parametrize(
    ("break_it", "invariant", "request_id"),
    [
        (free_a_held_block, "I1", None),
        (lose_a_free_block, "I1", None),
        (free_another_block, "I1", None),
        (count_no_holder_that_saves, "I1", None),
        (count_a_holder_too_many, "I1", None),
        (count_a_holder_too_few, "I1", None),
        (put_a_block_in_twice, "I1", "runs"),
        (find_by_a_name_not_carried, "I4", None),
        (carry_a_name_not_found, "I4", None),
        (name_a_block_being_written, "I4", "loads"),
        (hold_what_is_no_block, "I1", "runs"),
        (load_into_what_is_no_block, "I1", "loads"),
        (find_what_is_no_block, "I1", None),
        (free_what_is_no_block, "I1", None),
        (name_before_it_is_full, "I4", "runs"),
        (lose_the_name_of_a_full_block, "I4", "runs"),
        (list_a_copy_without_the_name, "I4", None),
        (free_a_copy, "I4", None),
        (free_what_is_found_among_copies, "I4", None),
        (copy_without_a_first, "I4", None),
        (copy_what_is_no_block, "I1", None),
        (swap_two_names, "I4", "runs"),
        (write_a_block_of_another, "I1", "runs"),
        (write_a_block_of_another, "I1", "loads"),
        (begin_a_load_too_far, "I2", "loads"),
        (compute_beyond_the_blocks, "I2", "loads"),
        (leave_no_work, "I2", "runs"),
        (reside_while_waiting, "I2", "waits"),
        (run_without_residing, "I2", "runs"),
        (fall_behind_the_admission, "I3", "runs"),
        (wait_and_run, "I8", "runs"),
        (run_and_wait, "I8", "waits"),
        (leave_the_queue, "I8", None),
        (wait_before_an_older_one, "I8", "waits"),
        (load_without_a_load, "I8", "loads"),
    ],
)
def test_a_broken_invariant_is_named(
    bench: Bench,
    break_it: Callable[[Scheduler], None],
    invariant: str,
    request_id: str | None,
) -> None:
    break_it(bench.scheduler)
    findings = audit(bench.scheduler)
    assert (invariant, request_id) in {(one.invariant, one.request_id) for one in findings}
    assert all(one.message for one in findings)


def test_a_finding_says_who_holds_the_block(bench: Bench) -> None:
    count_a_holder_too_few(bench.scheduler)
    (finding, *_) = audit(bench.scheduler)
    block = residency(bench.scheduler, "loads").blocks[-1]
    assert finding.message.startswith(f"block {block} has ")
    assert "request loads" in finding.message
