"""What the HTTP door adds to a request and to a token, beside the gRPC door of the same router.

    python -m benchmarks.door [--streams 16 64] [--times 5] [--shape llama-tiny]

The same number of streams goes through each door, and straight to the only worker, in turn; every
prompt is new. Added latency is a door's median less the worker's. The processor time is the
router's, read from the system: other load on the machine hardly changes it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from benchmarks.cluster.config import RandomPrompts
from benchmarks.cluster.router_cost import LONG, PROMPT_TOKENS, SHORT, processor_seconds
from benchmarks.cluster.streams import Burst, Timeline
from benchmarks.cluster.streams import run as run_grpc
from benchmarks.random_model import make_model
from kvrelay.cluster.layout import ClusterConfig
from kvrelay.cluster.supervisor import Cluster

NEW_TOKENS = 64
VOCABULARY = 256
BURSTS = 4
EVENT = b"data: {"
DONE = b"data: [DONE]"
Run = Callable[[Sequence[Sequence[int]], int], Burst]


def run_http(url: str, prompts: Sequence[Sequence[int]], count: int) -> Burst:
    """Send all prompts at once, each on a connection that is open already."""
    return asyncio.run(_burst(url, prompts, count))


async def _burst(url: str, prompts: Sequence[Sequence[int]], count: int) -> Burst:
    split = urlsplit(url)
    opened = [await asyncio.open_connection(split.hostname, split.port) for _ in prompts]
    pairs = zip(opened, prompts, strict=True)
    lines = await asyncio.gather(*(_one(*ends, prompt, count) for ends, prompt in pairs))
    return Burst(tuple(lines))


async def _one(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    prompt: Sequence[int],
    count: int,
) -> Timeline:
    """The last event of an answer has the finish reason and no token: it is not counted."""
    asked = {"prompt": list(prompt), "max_tokens": count, "temperature": 0, "stream": True}
    body = json.dumps({**asked, "ignore_eos": True, "return_token_ids": True}).encode()
    sent = time.perf_counter()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    stamps: list[float] = []
    before = b""
    while DONE not in before:
        data = await reader.read(1 << 16)
        if not data:
            raise SystemExit(f"the stream ended early: {before[-500:]!r}")
        stamps += [time.perf_counter()] * data.count(EVENT)
        before = before[-len(DONE) :] + data
    writer.close()
    return Timeline(sent, tuple(stamps[:-1]), (), ())


def first(burst: Burst) -> float:
    """The median time to the first token, in seconds."""
    return median(line.first for line in burst.lines)


def token(burst: Burst) -> float:
    """The median time of a later token."""
    return median((line.whole - line.first) / max(1, len(line.gaps)) for line in burst.lines)


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
        short, long = (_spent(run, prompts, streams, count, pid) for count in (SHORT, LONG))
        each = (long - short) / (LONG - SHORT)
        costs.append((short, each))
    for name, (grpc, http) in zip(("a request", "a token"), zip(*costs, strict=True), strict=True):
        print(
            f"{streams:>3} streams  processor time of {name:<10} gRPC {grpc:7.3f} ms"
            f"   HTTP {http:7.3f} ms   {http / grpc:.2f} times"
        )


def _spent(run: Run, prompts: RandomPrompts, streams: int, count: int, pid: int) -> float:
    """Milliseconds a stream."""
    before = processor_seconds(pid)
    for _ in range(BURSTS):
        run(prompts.many(streams, PROMPT_TOKENS), count)
    return (processor_seconds(pid) - before) * 1e3 / (BURSTS * streams)


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
