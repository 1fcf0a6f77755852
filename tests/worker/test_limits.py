"""The size of a worker's pool, and the warning about one that is smaller than a request may be."""

from __future__ import annotations

import logging
from typing import cast

import pytest
import torch

from kvrelay.engine.model.forward import CausalModel
from kvrelay.engine.model.loading import LoadedModel, ModelInfo
from kvrelay.process.memory import HostMemory
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.engines import native

LENGTH = 4096
POSITION = 2 * 2 * 4 * 8 * 2  # bytes: k and v, layers, heads, head_dim, bfloat16
MODEL = LoadedModel(
    ModelInfo(
        name="m",
        revision="r",
        architecture="A",
        dtype="bfloat16",
        device="cpu",
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        vocab_size=100,
        max_model_len=LENGTH,
        position_limit=LENGTH,
        eos_token_ids=(),
        num_parameters=1,
        logit_error=0.0,
    ),
    cast(CausalModel, None),
    torch.device("cpu"),
)


def positions(config: WorkerConfig) -> int:
    limits = native.limits_of(config, MODEL)
    return limits.num_blocks * limits.block_size


def test_the_default_is_a_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 100 * LENGTH * POSITION
    monkeypatch.setattr(native, "host_memory", lambda: HostMemory(2 * free, free))
    many = WorkerConfig(model="m", max_num_seqs=1000)
    assert positions(many) == 50 * LENGTH
    assert positions(WorkerConfig(model="m", max_num_seqs=1000, kv_share=0.25)) == 25 * LENGTH
    assert positions(WorkerConfig(model="m", max_num_seqs=3)) == 3 * LENGTH, "no more than useful"
    fixed = WorkerConfig(model="m", max_num_seqs=1000, kv_memory=7 * LENGTH * POSITION)
    assert positions(fixed) == 7 * LENGTH
    monkeypatch.setattr(native, "host_memory", lambda: None)
    assert positions(many) == native.UNKNOWN_MEMORY // 2 // POSITION


def test_a_pool_smaller_than_one_request_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert positions(WorkerConfig(model="m", kv_memory=LENGTH * POSITION)) == LENGTH
        assert not caplog.records
        assert positions(WorkerConfig(model="m", kv_memory=LENGTH * POSITION - 1)) == LENGTH - 16
    (record,) = caplog.records
    said = record.getMessage()
    assert f"holds {LENGTH - 16} positions" in said
    assert f"max_model_len {LENGTH}" in said
    assert "--kv-memory" in said
