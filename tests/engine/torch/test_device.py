"""Which device a worker computes on, and what it says where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kvrelay.config.reader import read
from kvrelay.engine.model import device
from kvrelay.engine.model.device import open_device
from kvrelay.errors import Rejected, Unservable
from kvrelay.worker.config import WorkerConfig


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, bool]:
    """A machine whose GPU, and whose torch, are as the test says."""
    seen = {"available": False}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen["available"])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(device, "_DEVICES", tmp_path)
    for name in (device.VISIBLE, device.CONTAINER):
        monkeypatch.delenv(name, raising=False)
    return seen


def test_auto(gpu: dict[str, bool]) -> None:
    assert open_device("auto").type == "cpu"
    gpu["available"] = True
    assert open_device("auto").type == open_device("cuda").type == "cuda"
    assert open_device("cpu").type == "cpu"


def test_auto_is_loud_where_a_gpu_cannot_be_used(
    gpu: dict[str, bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A torch for CUDA beside a device file, or a container that was given a GPU."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert open_device("auto").type == "cpu"  # a torch for the CPU was installed on purpose
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(Unservable, match=r"nvidia0\), and this torch cannot.*driver.*--device cpu"):
        open_device("auto")
    assert open_device("cpu").type == "cpu"
    monkeypatch.setenv(device.VISIBLE, "")  # hidden on purpose
    assert open_device("auto").type == "cpu"
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv(device.CONTAINER, "all")
    with pytest.raises(Unservable, match=r"NVIDIA_VISIBLE_DEVICES=all.*built without CUDA"):
        open_device("auto")
    monkeypatch.setenv(device.CONTAINER, "void")
    assert open_device("auto").type == "cpu"


def test_one_of_several(gpu: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The process sees that one alone; the number counts those that it saw before."""
    gpu["available"] = True
    assert open_device("cuda:2") == torch.device("cuda")
    assert os.environ[device.VISIBLE] == "2"
    monkeypatch.setenv(device.VISIBLE, "5,GPU-1f3a")
    assert open_device("cuda:1").type == "cuda"
    assert os.environ[device.VISIBLE] == "GPU-1f3a"
    with pytest.raises(Unservable, match="cuda:1: CUDA_VISIBLE_DEVICES shows 'GPU-1f3a' alone"):
        open_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(Unservable, match="in use already"):
        open_device("cuda:0")


@pytest.mark.parametrize("name", ["tpu", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "auto:1"])
def test_other_names(gpu: dict[str, bool], name: str) -> None:
    gpu["available"] = True
    with pytest.raises(Unservable, match="must be auto, cpu, cuda or cuda:N"):
        open_device(name)
    with pytest.raises(Rejected, match="choose one of auto, cpu, cuda, cuda:N"):
        _configured(name)


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:15"])
def test_names_of_the_option(name: str) -> None:
    assert _configured(name) == name


def _configured(name: str) -> str:
    return read(WorkerConfig, ["--model", "m", "--device", name], "worker", "", {}).device
