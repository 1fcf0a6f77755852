"""``python -m tests.accounting.watermark``: what the headroom costs and saves, load by load.

Counts only: positions computed and steps of the scheduler itself, without a model. The table in
docs/accounting.md is what this prints.
"""

from __future__ import annotations

import random
import sys
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


def run(jobs: list[Job], blocks: int, size: int, budget: int, headroom: int) -> tuple[int, int]:
    """Positions computed and steps. A token says how many were made, so a job can stop there."""
    scheduler = Scheduler(
        EngineLimits(blocks, size, 9999, 64, budget, headroom), naming(), lambda _: 0
    )
    for number, job in enumerate(jobs):
        prompt, ending = (number,) * job.prompt, frozenset({1000 + job.stop})
        scheduler.submit(Order(f"r{number}", prompt, job.prompt, job.new, ending, save=False))
    computed = steps = 0
    while scheduler.requests:
        plan = scheduler.schedule()
        computed += sum(entry.count for entry in plan.entries)
        made = [entry.request.length - entry.request.order.prompt_len for entry in plan.entries]
        sampled = zip(plan.entries, made, strict=True)
        scheduler.commit(plan, [1001 + count if e.samples else None for e, count in sampled])
        steps += 1
    return computed, steps


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
        results = [run(jobs, blocks, size, budget, headroom) for headroom in range(3)]
        cells = [f"{computed:,}; {steps:,}" for computed, steps in results]
        print(f"| {name} | {sum(job.ideal for job in jobs):,} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
