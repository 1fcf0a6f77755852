"""The router as a process: ready line, SIGTERM, a taken port, flags that are missing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.errors import Rejected
from router.config import RouterConfig
from tests.router.fakes import model

ROOT = Path(__file__).parents[2]
DECODE = ["--decode", "127.0.0.1:9"]


def start(*flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "router", *flags]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_ready_line_taken_port_and_sigterm() -> None:
    flags = ["--model", str(model()), *DECODE]
    with start(*flags, "--port", "0") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("router ready on 127.0.0.1:")
        port = line.split(":")[1]
        with start(*flags, "--port", port) as second:
            _, errors = second.communicate(timeout=60)
        assert second.returncode == 1
        assert f"cannot listen on 127.0.0.1:{port}" in errors
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert output == ""


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_several_workers_in_one_flag(role: str) -> None:
    given = {"decode": ("a:1",), role: ("a:1,b:2",)}
    with pytest.raises(Rejected, match=f"'a:1,b:2' has a comma: repeat --{role} for"):
        RouterConfig(model="recall", **given)  # type: ignore[arg-type]


def test_missing_flags() -> None:
    for flags in ([], ["--model", str(model())], ["--model", "/nonexistent", *DECODE]):
        with start(*flags) as process:
            _, errors = process.communicate(timeout=60)
        assert process.returncode in (1, 2)
        assert "Traceback" not in errors
        lines = [line for line in errors.splitlines() if "no credentials" not in line]
        assert len(lines) == 1, errors
