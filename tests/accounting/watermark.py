"""``python -m tests.accounting.watermark``: what the headroom costs and saves, load by load.

Counts only: positions computed and steps of the scheduler itself, without a model. The table in
docs/accounting.md is what this prints.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.engine.core.plan import EngineLimits
from kvrelay.engine.core.request import Order
from kvrelay.engine.core.scheduler import Scheduler
from tests.engine.fakes import naming

SEED = 1


@dataclass(frozen=True)
class Job:
    """``stop``: how many tokens are really made, where that is fewer than asked for."""

    prompt: int
    new: int
    stop: int = 9999

    @property
    def ideal(self) -> int:
        return self.prompt + min(self.new, self.stop) - 1


@dataclass(frozen=True)
class Outcome:
    """What a run took; ``ended`` is the step in which each job ended."""

    computed: int
    steps: int
    preemptions: int
    ended: tuple[int, ...]


def run(jobs: Sequence[Job], limits: EngineLimits, arrivals: Sequence[int] = ()) -> Outcome:
    """Run all jobs. A token says how many were made, so a job can stop where it is to.

    ``arrivals`` are the steps before which they are submitted, without any all at once.
    """
    scheduler = Scheduler(limits, naming(), lambda _: 0)
    due = deque(zip(arrivals or [0] * len(jobs), enumerate(jobs), strict=True))
    computed = steps = 0
    ended: dict[str, int] = {}
    while due or scheduler.requests:
        while due and due[0][0] <= steps:
            number, job = due.popleft()[1]
            prompt, ending = (number,) * job.prompt, frozenset({1000 + job.stop})
            scheduler.submit(Order(f"r{number}", prompt, job.prompt, job.new, ending, save=False))
        plan = scheduler.schedule()
        computed += sum(entry.count for entry in plan.entries)
        made = [entry.request.length - entry.request.order.prompt_len for entry in plan.entries]
        sampled = zip(plan.entries, made, strict=True)
        done = scheduler.commit(plan, [1001 + count if e.samples else None for e, count in sampled])
        steps += 1
        ended |= {output.request.id: steps for output in done.outputs if output.finish}
    at = tuple(ended[f"r{number}"] for number in range(len(jobs)))
    return Outcome(computed, steps, scheduler.preemptions, at)


def drain_jobs(asked: int | None, blocks: int) -> list[Job]:
    """256 requests of 64 and about 150 tokens, which ask for their true length or for more.

    0 asks for as many as fill the pool.
    """
    dice = random.Random(3)
    stops = [max(1, min(600, int(dice.expovariate(1 / 150)))) for _ in range(256)]
    return [Job(64, stop if asked is None else asked or blocks * 16 - 64, stop) for stop in stops]


def drain(jobs: Sequence[Job], blocks: int) -> Outcome:
    """At most 64 of them at once over a pool that does not hold so many."""
    return run(jobs, EngineLimits(blocks, 16, 9999, 64, 2048))


def loads() -> list[tuple[str, list[Job], int, int, int]]:
    dice = random.Random(SEED)
    mixed = [Job(dice.randint(10, 300), dice.randint(10, 200)) for _ in range(32)]
    early = [Job(dice.randint(10, 200), 400, dice.randint(5, 200)) for _ in range(64)]
    return [
        ("6 requests of 7 + 30, 12 blocks of 4", [Job(7, 30)] * 6, 12, 4, 512),
        ("16 of 64 + 128, 60 blocks of 16", [Job(64, 128)] * 16, 60, 16, 512),
        ("32 mixed, 100 blocks of 16", mixed, 100, 16, 512),
        ("64 that stop early, 120 blocks of 16", early, 120, 16, 512),
        ("24 of 20 + 300, 40 blocks of 16", [Job(20, 300)] * 24, 40, 16, 256),
    ]


def main() -> int:
    print(f"seed {SEED}\n\n| load | ideal | headroom 0 | 1 (default) | 2 |\n|---|---|---|---|---|")
    for name, jobs, blocks, size, budget in loads():
        results = [
            run(jobs, EngineLimits(blocks, size, 9999, 64, budget, headroom))
            for headroom in range(3)
        ]
        cells = [f"{result.computed:,}; {result.steps:,}" for result in results]
        print(f"| {name} | {sum(job.ideal for job in jobs):,} | {' | '.join(cells)} |")
    print("\n| blocks | asked for | steps | positions | preemptions |\n|---|---|---|---|---|")
    for blocks in (300, 400, 520):
        for asked, words in ((None, "what is used"), (2048, "2,048"), (0, "the whole pool")):
            done = drain(drain_jobs(asked, blocks), blocks)
            row = f"| {blocks} | {words} | {done.steps:,} | {done.computed:,} |"
            print(row, f"{done.preemptions} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
