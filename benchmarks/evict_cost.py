"""What a policy costs for each block: processor time of a put and of a lookup, and memory.

    python -m benchmarks.evict_cost [--blocks 100000]

Prompts of 32 blocks, one a second, go through the store's index; no bytes are moved. After the
store was filled every second prompt is one of the last 2,000, looked up, held and released, so that
the policy has learned. The best of four rounds is printed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import tracemalloc
from collections.abc import Sequence

from kvstore.claims import Claim
from kvstore.index.block_index import BlockIndex, IndexOptions
from kvstore.index.eviction import make_policy
from kvstore.limits import EVICTIONS
from kvstore.trace.simulate import FOREVER

PROMPT = 32
RECENT = 2000
ROUNDS = 4
WARM = 400
"""Prompts before the policy is measured while it evicts."""


class Driver:
    """One index under one policy, on a simulated clock."""

    def __init__(self, policy: str, blocks: int) -> None:
        self._index: BlockIndex[None] = BlockIndex(
            IndexOptions(blocks, FOREVER, b"cost"), make_policy(policy)
        )
        self._chance = random.Random(0)
        self._now = 0.0
        self._prompts: list[tuple[bytes, ...]] = []

    def put(self, prompts: int) -> float:
        """Put so many new prompts; returns the seconds for a block."""
        made = [tuple(self._chance.randbytes(32) for _ in range(PROMPT)) for _ in range(prompts)]
        began = time.process_time()
        for names in made:
            self._put(names)
        taken = time.process_time() - began
        self._prompts = [*self._prompts, *made][-RECENT:]
        return taken / prompts / PROMPT

    def look_up(self, prompts: int) -> float:
        """Look up, hold and release recent prompts; returns the seconds for a block."""
        chosen = self._chance.choices(self._prompts, k=prompts)
        began = time.process_time()
        for names in chosen:
            self._now += 1.0
            found = self._index.lookup(names, [], FOREVER, self._now)
            if found.lease is not None:
                self._index.release(found.lease.id)
        return (time.process_time() - began) / prompts / PROMPT

    def _put(self, names: Sequence[bytes]) -> None:
        self._now += 1.0
        claims = [
            Claim(name, 1, False, parent=parent)
            for name, parent in zip(names, [None, *names], strict=False)
        ]
        grant = self._index.reserve(claims, FOREVER, self._now)
        for claim in claims:
            if grant.ticket is not None:
                self._index.commit(grant.ticket, claim.name, None, self._now, claim.parent)


def measured(policy: str, blocks: int) -> str:
    """One row."""
    prompts = blocks // PROMPT
    driver = Driver(policy, blocks)
    filling = min(driver.put(prompts // ROUNDS) for _ in range(ROUNDS))
    for _ in range(WARM):
        driver.put(1)
        driver.look_up(1)
    found: list[float] = []
    evicting: list[float] = []
    for _ in range(ROUNDS):
        found.append(driver.look_up(WARM))
        evicting.append(driver.put(WARM))
    costs = " | ".join(f"{1e6 * one:.1f}" for one in (filling, min(evicting), min(found)))
    return f"| {policy} | {blocks:,} | {costs} | {memory(policy, min(blocks, 50_000)):.0f} |"


def memory(policy: str, blocks: int) -> float:
    """Bytes of Python objects for a block with a name of 32 bytes, none evicted yet."""
    tracemalloc.start()
    try:
        driver = Driver(policy, blocks)
        driver.put(blocks // PROMPT)
        return tracemalloc.get_traced_memory()[0] / blocks
    finally:
        tracemalloc.stop()


def main(argv: Sequence[str]) -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evict_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--blocks", type=int, default=100_000)
    options = parser.parse_args(argv)
    print(
        "| policy | blocks | put, µs | put that evicts, µs | lookup, µs | bytes a block |\n"
        "|---|--:|--:|--:|--:|--:|"
    )
    for policy in EVICTIONS:
        print(measured(policy, options.blocks), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
