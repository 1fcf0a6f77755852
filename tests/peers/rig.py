"""A real ``kvrelay up`` with the shipped model, its counts, and foreign programs that call it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvrelay.cluster.config import SHIPPED_MODEL
from kvrelay.cluster.layout import ROOT
from tests.cluster.processes import until
from tests.peers.environment import Environment
from tests.peers.pins import Peer

MODEL = str(SHIPPED_MODEL)
START_SECONDS = 90.0
RUN_SECONDS = 200.0
LEFT_SECONDS = 1.0
"""Within which a request ends whose client has left."""

ENDLESS = 4000
"""Tokens of an answer that a test leaves."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""No tool may ask a model hub: the tokenizer is that of the shipped model."""


@dataclass(frozen=True, slots=True)
class Served:
    """Where a running ``kvrelay up`` is reached."""

    http: str
    grpc: str
    model: str = "recall"

    def counted(self, name: str) -> int:
        """A number of the router's metrics page, over all its labels."""
        with urllib.request.urlopen(f"{self.http}/metrics", timeout=20) as page:
            text = page.read().decode()
        found = re.findall(rf"^kvrelay:router_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        assert found, f"no {name} in {len(text)} characters of metrics"
        return sum(int(float(number)) for number in found)

    @property
    def running(self) -> int:
        """Requests that run now."""
        return self.counted("running_requests")

    @property
    def generated(self) -> int:
        """Tokens sent to clients since the start."""
        return self.counted("generation_tokens_total")


@contextmanager
def up(folder: Path, *flags: str) -> Iterator[Served]:
    """``kvrelay up`` as a user runs it, on free ports."""
    endpoints, log = folder / "up.json", folder / "log"
    command = [
        *(sys.executable, "-m", "kvrelay", "up", "--port", "0", "--http-port", "0"),
        *("--threads", "1", "--store-budget", "64MiB", "--endpoints", str(endpoints), *flags),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:

        def serving() -> bool:
            assert process.poll() is None, log.read_text()
            return endpoints.exists()

        until(serving, lambda: f"up; it said:\n{log.read_text()}", START_SECONDS)
        content = json.loads(endpoints.read_text())
        yield Served(content["http"], content["router"])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def environment_of(peer: Peer) -> Environment:
    """The environment of a peer; without it the test is skipped, with the reason."""
    found = Environment(peer)
    if not found.installed:
        pytest.skip(found.reason)
    return found


def run(
    command: Sequence[str], folder: Path, changes: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a foreign program to its end; its failure is the test's, with all that it said."""
    with (folder / "said").open("w+") as said:
        done = subprocess.run(
            command,
            cwd=folder,
            env=foreign(folder, changes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        said.seek(0)
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{said.read()[-4000:]}"
    return done


def foreign(folder: Path, changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a foreign program: offline, its files in a folder of the test."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    own = {"HOME": str(folder), "OMP_NUM_THREADS": "1"}
    return {**kept, **own, **OFFLINE, **(changes or {})}


def seconds_until_idle(served: Served) -> float:
    """How long the router still runs a request; bounded."""
    since = time.monotonic()
    until(lambda: not served.running, lambda: "the request was cancelled", 20)
    return time.monotonic() - since
