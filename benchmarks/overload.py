"""Goodput and latency under more load than a cluster can serve.

    python -m benchmarks.overload [--seconds 15] [--shape llama-toy] [--deadline 20]
        [--queue-seconds 4] [--unbounded]

The capacity is measured first, with a few more clients than there is room for, each of which asks
again when it has its answer. Then requests come at random moments (Poisson), at multiples of that
rate, whether earlier ones were answered or not. Goodput counts the output tokens of requests that
were answered whole and in time. With ``--unbounded`` the router's queue has no bound, to compare.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.random_model import make_model
from kvrelay import AsyncClient
from kvrelay.cluster.layout import ClusterConfig
from kvrelay.cluster.supervisor import Cluster
from kvrelay.errors import DeadlineExceeded, Exhausted

FACTORS = (0.5, 1.0, 2.0, 3.0, 5.0)
SLOTS = 4
PROMPT, TOKENS = 64, 256
VOCAB = 256
PATIENT = 60.0  # seconds, while the capacity is measured


@dataclass(slots=True)
class OverloadTally:
    """The outcome of the requests of one load. Times in seconds."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)  # retry delays sent with refusals
    late: int = 0

    @property
    def offered(self) -> int:
        """All of them."""
        return len(self.whole) + len(self.delays) + self.late


async def one(
    client: AsyncClient, chance: random.Random, tally: OverloadTally, deadline: float
) -> None:
    """A request with a prompt of its own."""
    prompt, begun, first = [chance.randrange(VOCAB) for _ in range(PROMPT)], time.monotonic(), None
    try:
        async for _ in client.generate(
            timeout=deadline, token_ids=prompt, max_tokens=TOKENS, temperature=0.0, ignore_eos=True
        ):
            first = first or time.monotonic() - begun
    except Exhausted as refused:
        tally.delays.append(refused.retry_after)
    except DeadlineExceeded:
        tally.late += 1
    else:
        tally.first.append(first or 0.0)
        tally.whole.append(time.monotonic() - begun)


async def closed(address: str, chance: random.Random, clients: int, seconds: float) -> float:
    """Requests a second of so many clients that wait for their answers."""
    tally, until = OverloadTally(), time.monotonic() + seconds

    async def ask(client: AsyncClient) -> None:
        while time.monotonic() < until:
            await one(client, chance, tally, PATIENT)

    begun = time.monotonic()
    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(ask(client))
    return len(tally.whole) / (time.monotonic() - begun)


async def open_load(
    address: str, chance: random.Random, rate: float, seconds: float, deadline: float
) -> tuple[OverloadTally, float]:
    """Send requests at ``rate`` a second; their outcome, and the time it took."""
    tally, begun = OverloadTally(), time.monotonic()
    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        due = begun
        while (due := due + chance.expovariate(rate)) < begun + seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            group.create_task(one(client, chance, tally, deadline))
        busy_until = time.monotonic()
    # Requests still open when the load ends belong to it, and so does the time they take.
    return tally, max(seconds, time.monotonic() - begun) if tally.whole else busy_until - begun


def rank(values: Sequence[float], part: float) -> str:
    """A quantile for the table."""
    ordered = sorted(values)
    return f"{ordered[min(len(ordered) - 1, int(len(ordered) * part))]:.2f}" if ordered else "-"


def row(factor: float, tally: OverloadTally, seconds: float, peak: float) -> tuple[str, float]:
    """One line of the table, and its goodput in tokens a second."""
    goodput = len(tally.whole) * TOKENS / seconds
    cells = (
        f"{factor:g} x",
        f"{tally.offered}",
        f"{len(tally.whole)}",
        f"{len(tally.delays)}",
        f"{tally.late}",
        f"{goodput:,.0f}",
        f"{goodput / max(peak, goodput):.0%}",
        rank(tally.first, 0.5),
        rank(tally.first, 0.99),
        rank(tally.whole, 0.99),
        rank(tally.delays, 0.5),
    )
    return "| " + " | ".join(cells) + " |", goodput


HEAD = (
    "load",
    "offered",
    "answered",
    "refused",
    "late",
    "goodput tokens/s",
    "of the peak",
    "first token p50 s",
    "p99",
    "whole p99",
    "retry after, median s",
)


async def measure(address: str, seconds: float, seed: int, deadline: float) -> None:
    """Print the table."""
    chance, peak = random.Random(seed), 0.0
    await closed(address, chance, SLOTS, 3.0)  # warms up
    rate = await closed(address, chance, 2 * SLOTS, seconds)
    print(f"capacity: {rate:.1f} requests/s, {rate * TOKENS:,.0f} tokens/s; seed {seed}\n")
    print("| " + " | ".join(HEAD) + " |\n|" + "--:|" * len(HEAD))
    for factor in FACTORS:
        tally, took = await open_load(address, chance, factor * rate, seconds, deadline)
        line, goodput = row(factor, tally, took, peak)
        peak = max(peak, goodput)
        print(line, flush=True)


def main(argv: Sequence[str]) -> int:
    """Bring up a cluster with one decode worker and load it; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load")
    parser.add_argument("--shape", default="llama-toy", help="of the model, random weights")
    parser.add_argument("--deadline", type=float, default=20.0, help="seconds of each request")
    parser.add_argument("--queue-seconds", type=float, default=4.0, help="of the router")
    parser.add_argument("--unbounded", action="store_true", help="a queue without a bound")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    queue = (1 << 40, 1e6) if options.unbounded else (262_144, options.queue_seconds)
    os.environ["KVRELAY_QUEUE_TOKENS"], os.environ["KVRELAY_QUEUE_SECONDS"] = map(str, queue)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(options.shape, Path(folder) / options.shape, "float32")
        config = ClusterConfig(
            model=str(model), prefill=0, decode=1, port=0, max_num_seqs=SLOTS, threads=1
        )
        with Cluster(config) as cluster:
            asyncio.run(measure(cluster.router, options.seconds, options.seed, options.deadline))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
