"""A preempted request comes back like a newcomer of its age: it starves not, and wastes little."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from kvrelay.engine.core.plan import EngineLimits
from kvrelay.engine.core.request import RequestState
from tests.accounting.bench import Bench, limits
from tests.accounting.watermark import Job, drain, drain_jobs, run

SEEDS = range(150)
WASTE = 1.5


@pytest.mark.parametrize("blocks", [300, 400, 520])
def test_how_much_a_client_asks_for_does_not_matter_until_it_is_used(blocks: int) -> None:
    """256 requests that ask for their true length, for 600, for 2,048 tokens, for all there is."""
    results = {drain(drain_jobs(asked, blocks), blocks) for asked in (None, 600, 2048, 0)}
    print(results)
    (only,) = results
    assert only.computed <= 1.11 * sum(job.ideal for job in drain_jobs(None, blocks))


@dataclass(frozen=True)
class Load:
    """Jobs and the steps in which they arrive, over a small pool."""

    bounds: EngineLimits
    jobs: tuple[tuple[int, Job], ...]

    @classmethod
    def of(cls, seed: int) -> Load:
        dice = random.Random(seed)
        size, blocks, seqs = dice.choice([1, 2, 4, 16]), dice.randint(4, 60), dice.randint(2, 24)
        budget = dice.choice([seqs, seqs + size, 4 * seqs, 256])
        bounds = EngineLimits(blocks, size, 9999, seqs, budget, dice.choice([0, 1, 1, 2]))
        room, jobs = blocks * size, []
        for _ in range(dice.randint(4, 40)):
            prompt = dice.randint(1, max(1, room // dice.choice([1, 2, 3, 8])))
            new = dice.randint(1, max(1, (room - prompt + 1) // dice.choice([1, 1, 2, 4])))
            jobs.append(Job(prompt, new, dice.randint(1, new)))
        steps = sorted(dice.randint(0, dice.choice([0, 50, 400])) for _ in jobs)
        return cls(bounds, tuple(zip(steps, jobs, strict=True)))


@pytest.mark.parametrize("group", range(5))
def test_no_request_starves_and_little_is_computed_again(group: int) -> None:
    """Each ends no later than if all that came before it had run one after the other.

    The oldest request is never preempted and computes in every step at least what the others leave
    it of the budget. What all compute together stays below 1.5 times what one process would.
    """
    preempted = 0
    for seed in SEEDS[group::5]:
        print(f"seed {seed}")
        load = Load.of(seed)
        done = run([job for _, job in load.jobs], load.bounds, [step for step, _ in load.jobs])
        alone = max(load.bounds.max_num_batched_tokens - load.bounds.max_num_seqs + 1, 1)
        serial = 0
        for (arrived, job), ended in zip(load.jobs, done.ended, strict=True):
            serial = max(serial, arrived) - (-job.prompt // alone) + min(job.new, job.stop)
            assert ended <= serial
        assert done.computed <= WASTE * sum(job.ideal for _, job in load.jobs)
        preempted += done.preemptions
    assert preempted > 20


def test_the_most_repeated_work_that_a_search_found_is_bounded() -> None:
    """Hill climbing over 19,000 loads: 15 requests, mostly of 11 + 56, over 37 blocks of 2."""
    arrivals = [19, 21, 24, 34, 37, 48, 60, 62, 64, 65, 71, 89, 92, 93, 94]
    jobs = [Job(11, 64, 56)] * 15
    jobs[1], jobs[2], jobs[6], jobs[14] = (
        Job(51, 16, 10),
        Job(3, 16, 5),
        Job(11, 58, 57),
        Job(11, 53, 12),
    )
    ideal = sum(job.ideal for job in jobs)
    for headroom, most in ((0, 1.62), (1, 1.52)):
        done = run(jobs, EngineLimits(37, 2, 9999, 16, 36, headroom), arrivals)
        print(done.computed / ideal, done.preemptions)
        assert done.preemptions >= 20
        assert done.computed <= most * ideal
        serial = 0
        for arrived, job, ended in zip(arrivals, jobs, done.ended, strict=True):
            serial = max(serial, arrived) - (-job.prompt // 21) + job.stop
            assert ended <= serial


def test_a_preempted_request_returns_as_soon_as_its_length_fits() -> None:
    """It may grow to the whole pool. It returns when the second ends, long before the first."""
    bench = Bench(limits(17, 4, headroom=0))
    first = bench.submit("first", range(4), 60)
    second = bench.submit("second", range(100, 120), 12)
    third = bench.submit("third", range(200, 228), 41)
    while not bench.scheduler.preemptions:
        bench.step()
        bench.end_all()
    assert third.residency is None
    while second.state is not RequestState.FINISHED:
        bench.step()
        bench.end_all()
    bench.step()
    assert first.length < 30
    assert third.residency is not None
    bench.run()
