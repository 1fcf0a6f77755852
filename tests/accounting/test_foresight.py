"""Plans of steps that were foreseen while another was computed equal plans that were not."""

from __future__ import annotations

import random

from kvrelay.engine.core.foresight import NOTHING, entries_ahead
from kvrelay.engine.core.journal import Record, describe_plan
from kvrelay.engine.core.plan import EngineLimits, Plan
from kvrelay.engine.core.request import Order
from tests.accounting.bench import Bench, limits
from tests.engine.fakes import answer

SEEDS = 150


def bench_of(rng: random.Random) -> Bench:
    """Limits under which requests are preempted, chunked, loaded and refused a lookup's answer."""
    size = rng.choice((1, 2, 3, 4, 8))
    blocks = rng.randint(-(8 // -size) + 2, 24)
    bounds: EngineLimits = limits(
        blocks, size, seqs=rng.randint(2, 8), budget=rng.randint(2, 20), headroom=rng.randint(0, 2)
    )
    answers = random.Random(rng.random())
    given_up = rng.choice((1, 2))
    return Bench(
        bounds,
        lambda query: answers.choice((0, 0, 0, None, 5, 30)),
        cancels=lambda load: load.epoch % given_up == 0,
    )


def life(seed: int, share: float) -> list[Record]:
    """The plans of random requests; a share of them is foreseen between a plan and its commit."""
    rng, draws = random.Random(seed), random.Random(seed)
    bench = bench_of(rng)
    foreseen = NOTHING
    plans: list[Record] = []
    for number in range(40):
        if rng.random() < 0.5:
            _submit(bench, rng, number)
        plan = bench.begin(foreseen)
        foreseen = NOTHING
        plans.append(describe_plan(plan))
        moment = rng.randrange(4)
        for now in range(4):
            if now != moment:
                _happens(bench, rng)
            elif draws.random() < share:
                foreseen = entries_ahead(plan, bench.bounds.block_size)
        if rng.random() < 0.05:
            bench.scheduler.discard()
            foreseen = NOTHING
        else:
            _commit(bench, plan)
    return plans


def _commit(bench: Bench, plan: Plan) -> None:
    """The runner has no blocks of a request that was aborted."""
    kept = [entry for entry in plan.entries if entry.request.residency is not None]
    sampled = iter(bench.sample(Plan(tuple(kept), (), (), ())))
    results = [next(sampled) if entry in kept else None for entry in plan.entries]
    bench.saves += bench.scheduler.commit(plan, results).saves
    bench.check()


def _submit(bench: Bench, rng: random.Random, number: int) -> None:
    bounds = bench.bounds
    capacity = bounds.num_blocks * bounds.block_size
    prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, min(12, capacity - 1)))]
    new = rng.randint(1, min(20, capacity - len(prompt)))
    ending = frozenset(rng.sample(answer(prompt, new), rng.randint(0, 1)))
    order = Order(f"r{number}", tuple(prompt), len(prompt), new, ending, rng.random() < 0.1)
    bench.add(order)


def _happens(bench: Bench, rng: random.Random) -> None:
    """At most one event from outside the step."""
    event = rng.random()
    if event < 0.3 and bench.loads:
        load = rng.choice(bench.loads)
        bench.end_load(load, rng.randint(0, load.external))
    elif event < 0.6 and bench.saves:
        bench.end_save(rng.choice(bench.saves))
    elif event < 0.65 and bench.scheduler.requests:
        bench.scheduler.abort(rng.choice(list(bench.scheduler.requests)))


def test_a_foreseen_plan_is_the_plan() -> None:
    """Also if it is foreseen in some steps only."""
    for seed in range(SEEDS):
        expected = life(seed, 0.0)
        assert life(seed, 1.0) == expected, seed
        assert life(seed, 0.5) == expected, seed


def test_what_is_foreseen() -> None:
    """Requests that decode on in the blocks they have, and they alone."""
    bench = Bench(limits(16, 4, budget=7))
    for name, length in (("fits", 3), ("at the end of its block", 4), ("in chunks", 9)):
        bench.submit(name, range(length), 5)
    plan = bench.begin()
    assert [entry.count for entry in plan.entries] == [3, 4]
    foreseen = entries_ahead(plan, 4)
    (entry,) = foreseen.values()
    assert (entry.request.id, entry.start, entry.count, entry.samples) == ("fits", 3, 1, True)
    bench.finish(plan)
    following = bench.begin(foreseen)
    assert any(one is entry for one in following.entries)
    assert [one.request.id for one in following.entries] == [
        "fits",
        "at the end of its block",
        "in chunks",
    ]
