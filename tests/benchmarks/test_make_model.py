"""``kvrelay make-model`` shows how far it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.make_model import ShownProgress
from benchmarks.random_model import make_model as write_model


def test_the_share_of_drawn_weights_rises_to_one(tmp_path: Path) -> None:
    shares: list[float] = []
    write_model("llama-tiny", tmp_path, "float32", 0, shares.append)
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert len(shares) > 10


def test_it_is_shown_every_five_seconds_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moments = iter((100.0, 100.5, 102.0, 103.0, 108.0, 120.0))
    monkeypatch.setattr("benchmarks.make_model.time.monotonic", lambda: next(moments))
    shown = ShownProgress()
    for done in (0.1, 0.25, 0.3, 0.75, 1.0):
        shown.show(done)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "  25% of the weights drawn",
        "  75% of the weights drawn",
        "  writing the weights",
    ]
