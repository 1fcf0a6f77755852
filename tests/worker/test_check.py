"""``kvrelay.worker.check``: what a worker refuses at its start is refused before any starts."""

from __future__ import annotations

import pytest

from kvrelay.cluster.config import SHIPPED_MODEL
from kvrelay.process.gpus import VISIBLE
from kvrelay.worker.check import SERVABLE, main

MODEL = ("--model", str(SHIPPED_MODEL), "--device", "cpu")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), SERVABLE),
        (("--attention-backend", "sdpa"), SERVABLE),
        (("--attention-backend", "flash_attn"), "flash_attn cannot be used: "),
        (("--attention-backend", "varlen"), "this worker computes on cpu; dtype float32: "),
        (("--device", "cuda:99"), "CUDA_VISIBLE_DEVICES=99"),
        (("--max-model-len", "100000"), "max_model_len"),
    ],
)
def test_what_a_worker_would_refuse(
    flags: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VISIBLE, "")  # and restored afterwards
    monkeypatch.delenv(VISIBLE)
    assert main([*MODEL, *flags]) == (said != SERVABLE)
    (line,) = capsys.readouterr().out.splitlines()
    assert said in line
