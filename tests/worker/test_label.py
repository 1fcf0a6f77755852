"""Workers of one host have a name each on their metrics pages, whatever they listen on."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvrelay.cluster.ports import free_ports
from tests.models import tiny_model

ROOT = Path(__file__).parents[2]
ANYWHERE = ("--host", "0.0.0.0", "--allow-insecure")


def start(stack: ExitStack, model: Path, metrics: int, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "decode_service", "--model", str(model), *flags]
    pipe = subprocess.PIPE
    made = subprocess.Popen(
        [*command, "--metrics-port", str(metrics)], cwd=ROOT, stdout=pipe, stderr=pipe, text=True
    )
    stack.enter_context(made)
    stack.callback(made.kill)
    return made


def bound(process: subprocess.Popen[str]) -> str:
    """The port in the ready line."""
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.match(r"decode worker ready on \S+:(\d+):", line)
    assert found is not None, line
    return found[1]


def labels(port: int) -> set[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as page:
        text = page.read().decode()
    return set(re.findall(r'\bworker="([^"]*)"', text))


@pytest.mark.slow
@pytest.mark.cluster
def test_workers_that_pick_their_ports_have_different_names(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "llama")
    first, second = free_ports(2)
    with ExitStack() as stack:
        anywhere = [start(stack, model, port, *ANYWHERE) for port in (first, second)]
        ports = [bound(process) for process in anywhere]
        names = [name for port in (first, second) for name in labels(port)]
        assert [name.rpartition(":")[2] for name in names] == ports
        assert ports[0] != ports[1]
        late = start(stack, model, first)
        _, errors = late.communicate(timeout=60)
        assert late.returncode == 1
        assert f"metrics_port: cannot listen on 127.0.0.1:{first}" in errors
        assert "Traceback" not in errors
