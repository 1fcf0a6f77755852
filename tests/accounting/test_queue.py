"""A long queue costs a step nothing: few are asked about, few blocks are named, none are walked."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

import pytest

from kvrelay.connector.none import NoConnector
from kvrelay.engine.core.audit import audit
from kvrelay.engine.core.blocks import BlockPool, LeadingRun, Naming
from kvrelay.engine.core.external import Query
from kvrelay.engine.core.plan import EngineLimits, Plan
from kvrelay.engine.core.request import Order, Request, RequestState
from kvrelay.engine.core.scheduler import Lookup, Scheduler
from kvrelay.engine.engine import Engine
from kvrelay.sampling import Sampling
from tests.accounting.bench import Bench, limits
from tests.engine.fakes import ChainRunner, naming


class Counted:
    """A scheduler that counts the names it makes; ``running`` requests make a token each step."""

    def __init__(self, bounds: EngineLimits, lookup: Lookup, running: int) -> None:
        self.named = 0
        self.asked: list[str] = []
        self._lookup = lookup
        self._naming = naming()
        self.scheduler = Scheduler(bounds, Naming(b"root", self._child), self._ask)
        for number in range(running):
            self.submit(f"run{number}", [number, 1, 2], 500)
        self.step()
        assert len(self.scheduler.running) == running

    def submit(self, name: str, prompt: Sequence[int], new: int = 9) -> Request:
        return self.scheduler.submit(Order(name, tuple(prompt), len(prompt), new, save=False))

    def step(self) -> Plan:
        self.named = 0
        self.asked = []
        plan = self.scheduler.schedule()
        self.scheduler.commit(plan, [7 if entry.samples else None for entry in plan.entries])
        return plan

    def _ask(self, query: Query) -> int | None:
        self.asked.append(query.request_id)
        return self._lookup(query)

    def _child(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        self.named += 1
        return self._naming.child(parent, tokens)


def later(query: Query) -> int | None:
    return None if query.request_id.startswith("wait") else 0


@pytest.mark.parametrize("places", [1, 2, 8])
def test_as_many_requests_are_asked_about_as_there_are_places(places: int) -> None:
    counted = Counted(limits(4000, 16, seqs=8 + places), later, running=8)
    for number in range(200):
        counted.submit(f"wait{number}", range(number, number + 100))
    for _ in range(5):
        plan = counted.step()
        assert counted.asked == [f"wait{number}" for number in range(places)]
        assert len(plan.entries) == 8


def test_without_a_place_none_is_asked_about_or_named() -> None:
    counted = Counted(limits(4000, 16, seqs=8), later, running=8)
    for number in range(200):
        counted.submit(f"wait{number}", range(number, number + 100))
    for _ in range(5):
        counted.step()
        assert (counted.asked, counted.named) == ([], 0)


def test_a_long_queue_is_named_in_pieces_while_streams_go_on() -> None:
    """64 places, 64 prompts of 40 blocks: 100 names a step, and every stream has its token."""
    bounds = replace(limits(9000, 4, seqs=72), names_per_step=100)
    counted = Counted(bounds, later, running=8)
    waiting = [counted.submit(f"wait{n}", range(1000 * n, 1000 * n + 160)) for n in range(64)]
    steps = 0
    while (plan := counted.step()).unnamed:
        steps += 1
        assert len(plan.entries) == 8
        assert counted.named <= 100 + len(plan.entries)
    assert steps == 64 * 40 // 100
    assert all(len(request.names) == 40 for request in waiting)
    counted.step()
    assert len(counted.asked) == 64


def test_requests_that_are_named_in_pieces_are_served_in_their_order() -> None:
    bench = Bench(replace(limits(60, 4, budget=16), names_per_step=3))
    requests = [bench.submit(f"r{n}", range(10 * n, 10 * n + 30), 3) for n in range(6)]
    begun: list[Request] = []
    while bench.scheduler.requests:
        bench.step()
        bench.end_all()
        begun += [request for request in requests if request.runs or request.residency]
    assert list(dict.fromkeys(begun)) == requests
    bench.check_end()


class Asked(dict[bytes, int]):
    """The names of a pool; counts how often one is looked up."""

    count = 0

    def get(self, name: bytes, default: int | None = None) -> int | None:  # type: ignore[override]
        self.count += 1
        return super().get(name, default)


def test_what_a_waiting_request_found_is_not_looked_up_again() -> None:
    """20 requests of 40 cached blocks wait for the store while streams fill and evict blocks."""
    counted = Counted(limits(202, 4, seqs=40), lambda query: 0, running=0)
    prompt = range(1000, 1160)
    for cached in (range(640), [*prompt, 1]):  # they fill the pool; the first is evicted first
        counted.submit("cached", cached, new=1)
        while counted.scheduler.requests:
            counted.step()
    counted._lookup = later
    for number in range(8):
        counted.submit(f"run{number}", [number, 1, 2], 500)
    waiting = [counted.submit(f"wait{n}", [*prompt, n, 7]) for n in range(20)]
    pool = counted.scheduler.pool
    counted.step()
    assert [len(request.found.places) for request in waiting] == [40] * 20
    pool.by_name = asked = Asked(pool.by_name)
    pool.lost = deque(maxlen=16)  # more than are lost in a step, fewer than in all
    losses = pool.losses
    for _ in range(30):
        counted.step()
        assert not audit(counted.scheduler)
    audited = 30 * 20 * 40  # the audit walks them all
    assert pool.losses > losses + 20
    assert asked.count - audited <= 30 * 20
    counted._lookup = lambda query: 0
    counted.step()
    assert waiting[0].resident.admission.local == 160
    assert not waiting[0].found.places, "a resident request remembers nothing"


def walked(pool: BlockPool, names: Sequence[bytes], limit: int) -> list[int]:
    """D3, as it is defined."""
    return [pool.by_name[name] for name in takewhile(pool.by_name.__contains__, names[:limit])]


def test_a_remembered_run_is_what_a_walk_finds() -> None:
    """Random lives of blocks and names, few losses remembered, some runs asked about seldom."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(300):
        pool = BlockPool(chance.randint(2, 12))
        pool.lost = deque(maxlen=chance.choice([1, 2, 5, 100]))
        chains = [[b"%d%d" % (which, n) for n in range(6)] for which in range(2)]
        runs = [(LeadingRun(), chance.choice(chains), chance.randint(0, 6)) for _ in range(4)]
        held: list[int] = []
        for _ in range(60):
            if pool.free and chance.random() < 0.4:
                held += pool.take(1)
                pool.name(held[-1], chance.choice(chance.choice(chains)))
            elif held and chance.random() < 0.5:
                pool.drop([held.pop(chance.randrange(len(held)))])
            elif held:
                pool.name(chance.choice(held), chance.choice(chance.choice(chains)))
            for run, names, limit in chance.sample(runs, chance.randint(0, len(runs))):
                assert pool.leading(names, limit, run) == walked(pool, names, limit)


def test_an_engine_does_not_sleep_while_it_names_a_prompt() -> None:
    runner = ChainRunner(60, 4)
    bounds = replace(limits(60, 4), names_per_step=3)
    engine = Engine(runner, bounds, naming(), NoConnector(), lambda updates: None)
    engine.submit(Order("r", tuple(range(40)), 40, 3), Sampling())
    busy = [engine.turn() for _ in range(4)]
    assert busy == [True] * 4
    assert runner.executed_positions == 40


class Walked(deque[Request]):
    """A queue that counts the requests that were looked at one by one."""

    looks = 0

    def __iter__(self) -> Iterator[Request]:
        for request in super().__iter__():
            self.looks += 1
            yield request


class Unwalked(dict[str, Request]):
    """All requests by id; walking through them is an error."""

    def values(self) -> None:  # type: ignore[override]
        raise AssertionError("a step walks through all requests")


@pytest.mark.parametrize("room", [0, 3])
def test_no_step_walks_through_the_queue(room: int) -> None:
    counted = Counted(limits(4000, 16, seqs=8 + room), later, running=8)
    for number in range(3000):
        counted.submit(f"wait{number}", range(20))
    scheduler = counted.scheduler
    scheduler.waiting = walked = Walked(scheduler.waiting)
    scheduler.requests = Unwalked(scheduler.requests)
    for _ in range(10):
        counted.step()
    assert walked.looks <= 10 * room


def test_the_tokens_that_wait_are_counted_as_they_come_and_go() -> None:
    bench = Bench(limits(12, 4, seqs=2, headroom=0))
    first = bench.submit("first", range(8), 30)
    second = bench.submit("second", range(20, 28), 30)
    bench.submit("third", range(40, 51), 3)
    assert bench.scheduler.waiting_tokens == 8 + 8 + 11
    bench.step()
    assert bench.scheduler.waiting_tokens == 11
    while not bench.scheduler.preemptions:
        bench.step()
        bench.end_all()
    assert bench.scheduler.waiting_tokens == second.length + 11
    bench.scheduler.abort("third")
    assert bench.scheduler.waiting_tokens == second.length
    bench.run()
    assert first.state is RequestState.FINISHED
    assert bench.scheduler.waiting_tokens == 0


def test_those_that_pass_in_one_step_leave_room_for_what_they_become() -> None:
    """12 blocks of 1. The first must ask later and needs 3; the others become 4 each: two pass."""
    bench = Bench(
        limits(12, 1, headroom=0), lambda query: None if query.request_id == "late" else 0
    )
    bench.submit("late", range(10, 13), 1)
    others = [bench.submit(f"r{n}", [n], 4) for n in range(4)]
    bench.begin()
    assert [request.residency is not None for request in others] == [True, True, False, False]


@pytest.mark.parametrize(("blocks", "passes"), [(2, False), (3, True)])
def test_who_passes_leaves_headroom_for_the_skipped_request_too(blocks: int, passes: bool) -> None:
    counted = Counted(limits(blocks, 4, seqs=4), later, running=0)
    counted.submit("wait0", range(4), new=1)
    counted.submit("passes", range(4, 8), new=1)
    plan = counted.step()
    assert [entry.request.id for entry in plan.entries] == (["passes"] if passes else [])
