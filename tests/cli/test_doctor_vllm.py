"""What `kvrelay doctor --vllm-python` says of an interpreter; stand-ins print what vLLM's would."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from kvrelay.cli.doctor.machine import Diagnosis
from kvrelay.cli.doctor.vllm import INSTALL, check_vllm

FACTS: dict[str, object] = {
    "version": "0.32.0",
    "platform": "cpu",
    "runner": "V1",
    "attention": "cpu_attn-vec",
    "batch_invariant": False,
    "missing": [],
}


def said_of(folder: Path, line: str, status: int = 0) -> Diagnosis:
    """The diagnosis of an interpreter that prints a line, on stderr if it fails."""
    python = folder / "python"
    to = ">&2" if status else ""
    python.write_text(f"#!/bin/sh\necho {shlex.quote(line)} {to}\nexit {status}\n")
    python.chmod(0o700)
    (diagnosis,) = check_vllm(str(python))
    return diagnosis


@pytest.mark.parametrize(
    ("changed", "state", "found"),
    [
        (
            {},
            "ok",
            "0.32.0 on cpu, model runner V1, attention cpu_attn-vec, not batch-invariant",
        ),
        (
            {"batch_invariant": True, "runner": "V2"},
            "ok",
            "0.32.0 on cpu, model runner V2, attention cpu_attn-vec, batch-invariant",
        ),
        ({"missing": ["redis", "xxhash"]}, "missing", "0.32.0, without redis, xxhash"),
        (
            {"version": "0.33.1"},
            "absent",
            "0.33.1 on cpu, model runner V1, attention cpu_attn-vec, not batch-invariant",
        ),
    ],
)
def test_what_an_interpreter_has(
    tmp_path: Path, changed: dict[str, object], state: str, found: str
) -> None:
    diagnosis = said_of(tmp_path, json.dumps(FACTS | changed))
    assert (diagnosis.state, diagnosis.found) == (state, found)


def test_an_interpreter_without_vllm(tmp_path: Path) -> None:
    diagnosis = said_of(tmp_path, "No module named 'vllm'", 1)
    assert (diagnosis.state, diagnosis.means) == ("missing", INSTALL)
    assert diagnosis.found == "No module named 'vllm'"


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    (diagnosis,) = check_vllm(str(tmp_path / "none"))
    assert diagnosis.state == "missing"
    assert "none" in diagnosis.found


def test_no_interpreter_is_given() -> None:
    (diagnosis,) = check_vllm(None)
    assert (diagnosis.state, diagnosis.found) == ("absent", "not in this environment")
