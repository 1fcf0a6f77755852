"""What the HTTP door adds to a request and to a token, beside the gRPC door of the same router.

    python -m benchmarks.door [--streams 16 64] [--times 5] [--shape llama-tiny]

The same number of streams goes through each door, and straight to the only worker, in turn; every
prompt is new. Added latency is a door's median less the worker's. The processor time is the
router's, read from the system: other load on the machine hardly changes it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.cluster.config import RandomPrompts
from benchmarks.cluster.router_cost import LONG, PROMPT_TOKENS, SHORT
from benchmarks.cluster.streams import Burst
from benchmarks.cluster.streams import run as run_grpc
from benchmarks.door.streams import NEW_TOKENS, VOCABULARY, Run, first, run_http, spent, token
from benchmarks.random_model import make_model
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.supervisor import Cluster


def latencies(runs: Sequence[Run], prompts: RandomPrompts, streams: int, times: int) -> None:
    """Print the medians of both doors and of the worker, and what the doors add."""
    bursts: list[list[Burst]] = [[] for _ in runs]
    for turn in range(times + 1):
        for run, made in zip(runs, bursts, strict=True):
            burst = run(prompts.many(streams, PROMPT_TOKENS), NEW_TOKENS)
            if turn:  # the first one warms up
                made.append(burst)
    for name, what in (("first token", first), ("a token", token)):
        worker, grpc, http = (median(map(what, made)) * 1e3 for made in bursts)
        print(
            f"{streams:>3} streams  {name:<12} worker {worker:8.3f} ms   gRPC {grpc:8.3f}"
            f" (adds {grpc - worker:7.3f})   HTTP {http:8.3f} (adds {http - worker:7.3f})"
        )


def processor(runs: Sequence[Run], prompts: RandomPrompts, streams: int, pid: int) -> None:
    """Print the processor time that the router spends on a request and on a token."""
    costs = []
    for run in runs:
        short, long = (spent(run, prompts, streams, count, pid) for count in (SHORT, LONG))
        each = (long - short) / (LONG - SHORT)
        costs.append((short, each))
    for name, (grpc, http) in zip(("a request", "a token"), zip(*costs, strict=True), strict=True):
        print(
            f"{streams:>3} streams  processor time of {name:<10} gRPC {grpc:7.3f} ms"
            f"   HTTP {http:7.3f} ms   {http / grpc:.2f} times"
        )


def main(argv: Sequence[str]) -> int:
    """Measure on a cluster of one worker; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.door", description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--shape", default="llama-tiny")
    given = parser.parse_args(argv)
    prompts = RandomPrompts(VOCABULARY, 1)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(given.shape, Path(folder, "model"), "float32")
        config = ClusterConfig(
            model=str(model), prefill=0, port=0, http_port=0, max_num_seqs=max(given.streams)
        )
        with Cluster(config) as cluster:
            worker, http = cluster.addresses("decode")[0], cluster.http or ""
            pid = cluster.process("router").pid or 0

            def straight(sent: Sequence[Sequence[int]], count: int) -> Burst:
                return run_grpc("decode", worker, sent, count)

            def grpc(sent: Sequence[Sequence[int]], count: int) -> Burst:
                return run_grpc("router", cluster.router, sent, count)

            def door(sent: Sequence[Sequence[int]], count: int) -> Burst:
                return run_http(http, sent, count)

            for streams in given.streams:
                latencies((straight, grpc, door), prompts, streams, given.times)
                processor((grpc, door), prompts, streams, pid)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
