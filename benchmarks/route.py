"""Replays a trace of conversations through the router's policies, with a simulated clock.

    python -m benchmarks.route TRACE [--speed 1.0] [--limit N]

TRACE holds one JSON object a line: ``timestamp`` (ms), ``input_length``, ``output_length`` and
``hash_ids`` (of blocks of 512 tokens). Then the time that one decision takes is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.fleet import Fleet, FleetRequest, FleetResult, FleetShape
from benchmarks.policies import POLICIES, placement_policy
from kvrelay.block.name import Namer
from kvrelay.rpc.channel import ChannelOptions
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.security.identity import Tenant
from kvrelay.sampling import stored_positions
from kvrelay.v1.types_pb2 import ROLE_DECODE, ROLE_PREFILL
from kvrelay.v1.worker_pb2 import Namespace, WorkerInfo, WorkerLoad
from kvstore.trace.requests import BLOCK_TOKENS, read_trace
from router.config import RouterConfig
from router.placement.affinity import Affinity
from router.placement.placer import NextLeg, Placer, StreamBinding, namespace_of
from router.placement.policy import PREFILL, LegDemand, Prefix, choose
from router.workers.candidate import Candidate
from router.workers.health import READY
from router.workers.link import GrpcLink
from router.workers.registry import Registry
from router.workers.worker import KnownWorker

NAMER = Namer(
    namespace_of(WorkerInfo(namespace=Namespace(block_size=16, format_version=1)), Tenant())
)
SEED = 1
WORKERS, PREFIXES, DECISIONS, REPEATS = 64, 10_000, 500, 7


@dataclass(frozen=True, slots=True)
class Result:
    """One policy on one trace. Times in seconds."""

    policy: str
    local: float  # share of prompt tokens
    fetched: float
    queue: float
    balance: float  # computed tokens of the busiest worker, over the mean
    streams: float  # the same of stream seconds on decode workers
    mean: float
    p99: float


def read(path: Path, speed: float, limit: int | None) -> Iterator[FleetRequest]:
    """The requests, in order; ``speed`` 2 asks them in half the time."""
    for one in read_trace(path, limit):
        full = one.names[: one.tokens // BLOCK_TOKENS]
        yield FleetRequest(one.at / speed, one.tokens, one.output, full)


def replay(name: str, trace: Sequence[FleetRequest], shape: FleetShape) -> Result:
    """One policy over the whole trace."""
    fleet = Fleet(shape, placement_policy(name, SEED), placement_policy(name, SEED + 1))
    served = [fleet.serve(asked) for asked in trace]
    tokens = sum(asked.tokens for asked in trace)
    work = [0] * shape.prefill
    for one in served:
        work[one.worker] += one.computed
    firsts = sorted(one.first_token for one in served)
    return Result(
        policy=name,
        local=sum(one.local for one in served) / tokens,
        fetched=sum(one.fetched for one in served) / tokens,
        queue=_mean_queue(served),
        balance=max(work) / mean(work),
        streams=max(fleet.streams) / mean(fleet.streams),
        mean=mean(firsts),
        p99=firsts[len(firsts) * 99 // 100],
    )


def _mean_queue(served: Sequence[FleetResult]) -> float:
    return mean(one.queue for one in served)


def decision_seconds() -> float:
    """Of one choice among many workers that hold many prefixes: lookup, choice, record."""
    chance, known = random.Random(SEED), Affinity()
    keys = [f"worker-{n}" for n in range(WORKERS)]
    chains = _chains(chance)
    for chain in chains:
        known.record(chain, chance.choice(keys), 4096)
    candidates = [
        Candidate(key, chance.randrange(9), chance.randrange(9000), 1 << 20, 1 << 20)
        for key in keys
    ]
    asked = [chance.choice(chains) for _ in range(DECISIONS)]
    return min(_decide(known, candidates, asked) for _ in range(REPEATS))  # others use the machine


def _chains(rng: random.Random) -> list[tuple[bytes, ...]]:
    lengths = [rng.randrange(1, 40) for _ in range(PREFIXES)]
    return [tuple(f"{n}/{i}".encode() for i in range(size)) for n, size in enumerate(lengths)]


class _Ready(Registry):
    """Usable workers that no watcher checks."""

    def admit(self, number: int, rng: random.Random) -> None:
        """Add a usable worker with legs on it."""
        role = ROLE_DECODE if number % 2 else ROLE_PREFILL
        address = f"127.0.0.1:{number + 1}"
        worker = KnownWorker(address, role, GrpcLink(address, ChannelOptions()))
        worker.info = WorkerInfo(
            worker_id=f"worker-{number}",
            role=role,
            started_as=role,
            store="kvrelay://",
            namespace=Namespace(block_size=16),
            num_blocks=4096,
            max_model_len=1 << 16,
        )
        worker.load = WorkerLoad(
            steps=1, running=rng.randrange(9), free_blocks=2048, waiting_tokens=rng.randrange(9000)
        )
        worker.health = READY
        self._workers[role, worker.address] = worker


async def place_seconds() -> float:
    """Seconds that the router takes to place a request; half of the workers are of each role."""
    rng = random.Random(SEED)
    config = RouterConfig(model=".", decode=("127.0.0.1:1",))
    registry = _Ready(config)
    for number in range(WORKERS):
        registry.admit(number, rng)
    placer = Placer(registry, config)
    chains = _chains(rng)
    legs = [_leg(chain) for chain in rng.sample(chains, DECISIONS)]
    for chain in chains:
        await placer.place(_leg(chain))
    best = min([await _placed(placer, legs) for _ in range(REPEATS)])
    await registry.close()
    return best


def _leg(chain: tuple[bytes, ...]) -> NextLeg:
    prompt = len(chain) * 16 + 5
    return NextLeg(
        prompt_tokens=prompt,
        so_far=0,
        positions=stored_positions(prompt, 64),
        bound=StreamBinding("", "", b"", Prefix(chain, 16), NAMER),
        deadline=Deadline.after(600.0),
    )


async def _placed(placer: Placer, legs: Sequence[NextLeg]) -> float:
    begun = time.perf_counter()
    for leg in legs:
        await placer.place(leg)
    return (time.perf_counter() - begun) / len(legs)


def _decide(
    known: Affinity, candidates: Sequence[Candidate], asked: Sequence[tuple[bytes, ...]]
) -> float:
    begun = time.perf_counter()
    for chain in asked:
        demand = LegDemand(len(chain) * 16 + 5, 10, Prefix(chain, 16), PREFILL)
        choice = choose(demand, candidates, known.leading(chain))
        if choice is not None:
            known.record(chain, choice.key, 4096)
    return (time.perf_counter() - begun) / DECISIONS


def main(argv: Sequence[str]) -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.route", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--speed", type=float, default=1.0, help="times as fast as recorded")
    parser.add_argument(
        "--store", type=int, default=FleetShape().store, help="its capacity in blocks"
    )
    parser.add_argument("--limit", type=int, help="only so many requests")
    options = parser.parse_args(argv)
    trace, shape = (
        list(read(options.trace, options.speed, options.limit)),
        FleetShape(store=options.store),
    )
    print(f"{len(trace)} requests, {trace[-1].at:.0f} s, {shape}")
    print(
        f"{'policy':14}{'local':>8}{'fetched':>9}{'queue s':>9}{'balance':>9}"
        f"{'streams':>9}{'mean s':>9}{'p99 s':>9}"
    )
    for name in POLICIES:
        row = replay(name, trace, shape)
        print(
            f"{row.policy:14}{row.local:8.1%}{row.fetched:9.1%}{row.queue:9.3f}{row.balance:9.3f}"
            f"{row.streams:9.3f}{row.mean:9.3f}{row.p99:9.3f}"
        )
    print(
        f"one decision among {WORKERS} workers and {PREFIXES} prefixes:"
        f" {decision_seconds() * 1e6:.0f} us;"
        f" placing a request, both roles looked at: {asyncio.run(place_seconds()) * 1e6:.0f} us"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
