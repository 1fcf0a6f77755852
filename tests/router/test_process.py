"""The router as a process: ready line, SIGTERM, a taken port, flags that are missing."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
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


def test_an_answer_that_is_read_slowly_survives_sigterm() -> None:
    """It is computed, so it has the rest of the grace; a client that reads nothing ends with it."""
    body = json.dumps({"prompt": "x" * 1_000_000, "return_token_strs": True}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    flags = ["--model", str(model()), *DECODE, "--port", "0", "--http-port", "0"]
    with start(*flags, "--grace", "20") as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().split("http://127.0.0.1:")[1].split(":")[0])
        with socket.socket() as made:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            made.connect(("127.0.0.1", port))
            made.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            reader = made.makefile("rb")
            fields = dict(
                line.split(b": ", 1) for line in iter(reader.readline, b"\r\n") if b": " in line
            )
            process.send_signal(signal.SIGTERM)
            left = int(fields[b"content-length"])
            read, begun = 0, time.monotonic()
            while part := reader.read1(65536):
                read += len(part)
                if time.monotonic() - begun < 2.5:
                    time.sleep(0.1)
            assert read == left
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "not drained" not in errors


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
