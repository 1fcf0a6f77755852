"""What a worker says about the attention it computes with."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.cluster.layout import ROOT
from kvrelay.engine.attention.native import library
from kvrelay.engine.core.plan import EngineLimits
from kvrelay.engine.model.loading import load_model
from kvrelay.engine.step_down import Way
from kvrelay.worker.engines.native import open_runner
from tests.models import tiny_model


def test_sdpa_is_logged_with_the_reason(
    compiled: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line if "auto" cannot have the kernel, none if it can or if SDPA was asked for."""
    model = load_model(tiny_model("llama", tmp_path / "llama"), "float32", "cpu")
    limits = EngineLimits(8, 16, 64, 4, 64)
    with caplog.at_level(logging.WARNING):
        assert open_runner(model, limits, Way("auto"), 1).attention_profile.startswith("native-")
        assert open_runner(model, limits, Way("sdpa"), 1).attention_profile == "sdpa-5"
        assert not caplog.records
        monkeypatch.setattr(library, "FOLDER", tmp_path)
        library._load.cache_clear()
        try:
            assert open_runner(model, limits, Way("auto"), 1).attention_profile == "sdpa-5"
        finally:
            library._load.cache_clear()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("attention is sdpa-5: native cannot be used: not compiled")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("OMP_THREAD_LIMIT", "1", "1 is less than 2 threads"),  # of torch, which tests the model
        ("OMP_THREAD_LIMIT", "2", "2 is less than 4 threads"),
        ("OMP_DYNAMIC", "true", "a step may get fewer threads"),
    ],
)
def test_a_worker_refuses_to_get_too_few_threads(name: str, value: str, words: str) -> None:
    """Products of oneDNN would be wrong."""
    model = str(ROOT / "kvrelay/recall/model")
    options = ("--model", model, "--port", "0", "--threads", "4", "--device", "cpu")
    done = subprocess.run(
        [sys.executable, "-m", "prefill_service", *options],
        env={**os.environ, "OMP_NUM_THREADS": "2", name: value},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert f"{name}: {words}" in done.stderr
