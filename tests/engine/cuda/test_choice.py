"""``--attention-backend triton``: refused with the reason where the kernels cannot run."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import numpy as np
import pytest
import torch

from kvrelay.engine.attention.choice import choose_attention
from kvrelay.engine.attention.pool import KVPool, PoolShape
from kvrelay.engine.attention.triton_backend import slots_of
from kvrelay.engine.cuda.launch import unusable
from kvrelay.errors import Rejected
from kvrelay.worker.config import ATTENTION_BACKENDS

POOL = PoolShape(2, 1, 4, 1, 16, "float32")
_find_spec = importlib.util.find_spec


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if triton were installed, and not its interpreter."""

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "triton" else _find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_a_worker_on_the_cpu(installed: None) -> None:
    with pytest.raises(Rejected, match="triton cannot be used: its kernels run on a CUDA device"):
        choose_attention("triton", KVPool(POOL))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Rejected, match="attention_backend: triton cannot be used: the package"):
        choose_attention("triton", KVPool(POOL))


def test_an_old_device(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"capability": (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found["capability"])
    reason = unusable(torch.device("cuda"))
    assert reason == "it needs compute capability 8.0, and the device has 7.5"
    found["capability"] = (8, 0)
    assert unusable(torch.device("cuda")) is None


def test_the_interpreter_is_no_device(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert unusable(torch.device("cpu")) is None
    reason = unusable(torch.device("cuda"))
    assert reason is not None
    assert "on the CPU alone" in reason


def test_the_option_names_every_backend() -> None:
    for name in ATTENTION_BACKENDS:
        try:
            assert choose_attention(name, KVPool(POOL)).backend.profile
        except Rejected as error:
            assert f"{name} cannot be used: " in str(error)  # noqa: PT017 - not every machine can
    with pytest.raises(Rejected) as caught:
        choose_attention("magic", KVPool(POOL))
    *others, last = ATTENTION_BACKENDS
    assert f"is not known: {', '.join(others)} or {last}" in str(caught.value)


def test_slots() -> None:
    """Where K and V of packed rows lie: a decode row at position 5, a chunk of positions 3 to 8."""
    spans = np.array([[0, 5, 1, 0], [1, 3, 6, 2]])
    blocks = np.array([7, 2, 4, 0, 9], np.int32)
    found = slots_of(spans, blocks, 4).tolist()
    assert found == [2 * 4 + 1, 4 * 4 + 3, 0, 1, 2, 3, 9 * 4]
