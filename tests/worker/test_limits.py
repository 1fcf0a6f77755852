"""The size of a worker's pool, and the warning about one that is smaller than a request may be."""

from __future__ import annotations

import logging

import pytest

from kvrelay.process.memory import HostMemory
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.engines import native
from tests.worker.models import LENGTH, MODEL, POSITION


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
