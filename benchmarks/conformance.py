"""`kvrelay conform` against kvrelay, `vllm serve`, llama.cpp's server and `transformers serve`.

    python -m benchmarks.conformance kvrelay --out FOLDER [--model FOLDER]
    python -m benchmarks.conformance vllm --python PYTHON --out FOLDER

"workers" is kvrelay with vLLM in its workers, "connector" is `vllm serve` with our connector.
Starts one server on the CPU with the weights of a small random model, examines it, restarts it with
another size of chunks meanwhile, and leaves `conform.json`, `conform.html`, the server's log and
`serve.sh`, which has its command lines, in the folder.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

from benchmarks.door.connector import BLOCK, start_store, with_store
from benchmarks.door.vllm import COMMAND
from benchmarks.peers import vllm_environ
from benchmarks.random_model import make_model
from kvrelay.cluster.layout import ROOT
from kvrelay.cluster.ports import free_ports

SHAPE = "llama-toy"
START_SECONDS = 420.0
CHUNK = 64  # tokens of a step after the restart
KVRELAY = "import sys; from kvrelay.cli.main import main; sys.exit(main())"
SERVE = """\
#!/bin/sh
# KVRELAY_RESTART=0 starts the server, 1 ends it and starts it with smaller chunks, -1 ends it.
cd {folder}
if [ -f pid ]; then
  kill -TERM $(cat pid) 2>/dev/null
  for _ in $(seq 100); do kill -0 -$(cat pid) 2>/dev/null || break; sleep 0.2; done
  kill -KILL -$(cat pid) 2>/dev/null
fi
rm -f pid
case "${{KVRELAY_RESTART:-0}}" in
  -1) exit ;;
  0) set -- {first} ;;
  *) set -- {second} ;;
esac
setsid env {environ} "$@" >> log 2>&1 < /dev/null &
echo $! > pid
"""


@dataclass(frozen=True, slots=True)
class ExaminedServer:
    """``words`` start it; ``chunks`` are further ones after the restart, ``flags`` for conform."""

    words: Sequence[str]
    chunks: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)
    flags: Sequence[str] = ()


def kvrelay(options: argparse.Namespace, model: Path, port: int, threads: int) -> ExaminedServer:
    """One prefill and two decode workers, a pool and a store that are soon full."""
    words = [sys.executable, "-c", KVRELAY, "up", "--model", str(model), "--http-port", str(port)]
    words += ["--port", "0", "--threads", str(threads), "--decode", "2", "--dtype", options.dtype]
    words += ["--num-blocks", "128", "--store-budget", "2MiB"]
    return ExaminedServer(words, ["--max-num-batched-tokens", str(CHUNK)])


def vllm(options: argparse.Namespace, model: Path, port: int, threads: int) -> ExaminedServer:
    """With its prefix cache, soon full, and counts of what it had there.

    Version 0.32 ends on the CPU when the prompt of a request with a seed is computed in chunks
    (`CPU Generator does not use offset`): greedy requests, or with `--whole` prompts in one step.
    """
    words = [options.python, "-c", COMMAND, "serve", str(model), "--port", str(port)]
    words += ["--max-model-len", "2048", "--max-num-seqs", "32", "--dtype", options.dtype]
    words += ["--enable-prompt-tokens-details", "--num-gpu-blocks-override", "96"]
    environ = vllm_environ(threads)
    if options.invariant:
        environ["VLLM_BATCH_INVARIANT"] = "1"
    if options.whole:
        return ExaminedServer([*words, "--max-num-batched-tokens", "32768"], [], environ)
    chunks = ["--max-num-batched-tokens", str(CHUNK)]
    return ExaminedServer(words, chunks, environ, ["--no-sampled"])


def workers(options: argparse.Namespace, model: Path, port: int, threads: int) -> ExaminedServer:
    """kvrelay whose workers run vLLM."""
    made = kvrelay(options, model, port, threads)
    words = [*made.words, "--engine", "vllm", "--vllm-python", options.python]
    words += ["--block-size", str(BLOCK), "--vllm-option", "enforce_eager=true"]
    return ExaminedServer(words, made.chunks)


def connector(options: argparse.Namespace, model: Path, port: int, threads: int) -> ExaminedServer:
    """`vllm serve` with our connector; its store outlives the restart."""
    made = vllm(options, model, port, threads)
    words = [*made.words, "--block-size", str(BLOCK), "--enforce-eager", *with_store(options.store)]
    environ = {**made.environ, "PYTHONPATH": str(ROOT)}
    return ExaminedServer(words, made.chunks, environ, made.flags)


def llama(options: argparse.Namespace, model: Path, port: int, threads: int) -> ExaminedServer:
    """Weights as GGUF in bfloat16; 16 slots that keep their prompts."""
    program = str(Path(__file__).with_name("llama_server.py"))
    words = [options.python, program, str(model), str(port), str(threads), "--cache"]
    return ExaminedServer(words, ["--batch", str(CHUNK)], flags=["--model", "model"])


def transformers(
    options: argparse.Namespace, model: Path, port: int, threads: int
) -> ExaminedServer:
    """As it is by default, or with continuous batching; it samples only where the model says so."""
    (model / "generation_config.json").write_text('{"do_sample": true}')
    program = "from transformers.cli.transformers import main; main()"
    words = [options.python, "-c", program, "serve", str(model), "--port", str(port)]
    words += ["--dtype", options.dtype, "--device", "cpu"]
    chunks = []
    if options.batching:
        words += ["--continuous-batching", "--cb-num-blocks", "256"]
        chunks = ["--cb-max-batch-tokens", str(CHUNK)]
    hub = options.out.resolve() / "hub"  # without this folder it cannot list its models
    hub.mkdir(exist_ok=True)
    environ = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub)}
    return ExaminedServer(words, chunks, environ, ["--model", str(model)])


SERVERS = {one.__name__: one for one in (kvrelay, workers, vllm, connector, llama, transformers)}


def main() -> int:
    """The status of `kvrelay conform`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("server", choices=SERVERS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable, help="of the server's environment")
    parser.add_argument("--model", type=Path, help=f"default: a random {SHAPE}")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--invariant", action="store_true", help="vLLM's batch invariance")
    parser.add_argument("--whole", action="store_true", help="vLLM: prompts in one step")
    parser.add_argument("--batching", action="store_true", help="transformers' own batching")
    options, more = parser.parse_known_args()
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model = options.model or make_model(SHAPE, folder / "model", options.dtype)
    with ExitStack() as stack:
        if options.server == connector.__name__:
            options.store = start_store(stack)[0]
        return examine(options, more, folder, model.resolve())


def examine(options: argparse.Namespace, more: list[str], folder: Path, model: Path) -> int:
    """Start the server, ask it and end it; the status of `kvrelay conform`."""
    (port,) = free_ports(1)
    made = SERVERS[options.server](options, model, port, options.threads)
    script = folder / "serve.sh"
    script.write_text(
        SERVE.format(
            folder=shlex.quote(str(folder)),
            first=shlex.join(made.words),
            second=shlex.join([*made.words, *made.chunks]),
            environ=shlex.join(f"{name}={value}" for name, value in made.environ.items()),
        )
    )
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", KVRELAY, "conform", url, "--restart-command", f"sh {script}"]
    command += ["--json", str(folder / "conform.json"), "--html", str(folder / "conform.html")]
    try:
        subprocess.run(["sh", str(script)], check=True)
        _wait(url, folder)
        return subprocess.run([*command, *made.flags, *more]).returncode
    finally:
        subprocess.run(["sh", str(script)], env={**os.environ, "KVRELAY_RESTART": "-1"})


def _wait(url: str, folder: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if _is_ready(url):
            return
        time.sleep(0.5)
    raise SystemExit(f"no server at {url}; see {folder}/log")


def _is_ready(url: str) -> bool:
    """Whether it can generate: our router lists its model before it has workers."""
    try:
        urllib.request.urlopen(f"{url}/v1/models", timeout=5).close()
        urllib.request.urlopen(f"{url}/ready", timeout=5).close()
    except urllib.error.HTTPError as error:
        return error.code == HTTPStatus.NOT_FOUND  # another server has no such page
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
