"""``kvrelay make-model`` shows how far it is, and writes over nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.make_model import ShownProgress
from benchmarks.random_model import make_model as write_model
from kvrelay.cli.dispatch import main


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


def test_a_folder_with_files_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "config.json"
    kept.write_text("mine")
    for out in (tmp_path, kept):
        assert main(["make-model", "--shape", "llama-tiny", "--out", str(out)]) == 2
        assert capsys.readouterr().err == (
            f"kvrelay make-model: out: {out} exists and is not an empty folder: name another one\n"
        )
    assert kept.read_text() == "mine"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["make-model", "--shape", "llama-tiny", "--out", str(empty)]) == 0
    assert (empty / "model.safetensors").exists()
