"""What a worker says about the attention it computes with."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

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
        assert open_runner(model, limits, Way("sdpa"), 1).attention_profile == "sdpa-3"
        assert not caplog.records
        monkeypatch.setattr(library, "FOLDER", tmp_path)
        library._load.cache_clear()
        try:
            assert open_runner(model, limits, Way("auto"), 1).attention_profile == "sdpa-3"
        finally:
            library._load.cache_clear()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("attention is sdpa-3: native cannot be used: not compiled")
