"""Which device a worker computes on, and what it says where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvrelay.cluster.config import SHIPPED_MODEL
from kvrelay.config.reader import read
from kvrelay.engine.graphs import CudaGraphs, GraphLimits
from kvrelay.engine.kernels import kernels
from kvrelay.engine.model import device
from kvrelay.engine.model.device import open_device
from kvrelay.errors import Rejected, Unservable
from kvrelay.process.gpus import VISIBLE, show_one
from kvrelay.worker.config import WorkerConfig


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, bool]:
    """A machine whose GPU, and whose torch, are as the test says."""
    seen = {"available": False}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen["available"])
    monkeypatch.setattr(device, "_DEVICES", tmp_path)
    monkeypatch.setattr(device, "_WSL", tmp_path / "wsl")
    for name in (VISIBLE, device.CONTAINER):
        monkeypatch.setenv(name, "")  # and restored afterwards
        monkeypatch.delenv(name)
    return seen


def test_auto(gpu: dict[str, bool]) -> None:
    assert open_device("auto").type == "cpu"
    gpu["available"] = True
    assert open_device("auto").type == open_device("cuda").type == "cuda"
    assert open_device("cpu").type == "cpu"


def test_auto_is_loud_where_a_gpu_cannot_be_used(
    gpu: dict[str, bool],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A torch for CUDA beside a device file, or a container that was given a GPU."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert open_device("auto").type == "cpu"  # such a torch may have been installed on purpose
    (said,) = caplog.messages
    assert "computing on the CPU" in said
    assert "nvidia0), and this torch cannot use it: torch" in said
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(Unservable, match=r"nvidia0\), and this torch cannot.*driver.*--device cpu"):
        open_device("auto")
    assert open_device("cpu").type == "cpu"
    monkeypatch.setenv(VISIBLE, "")  # hidden on purpose
    assert open_device("auto").type == "cpu"
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv(device.CONTAINER, "all")
    with pytest.raises(Unservable, match=r"NVIDIA_VISIBLE_DEVICES=all.*built without CUDA"):
        open_device("auto")
    monkeypatch.setenv(device.CONTAINER, "void")
    assert open_device("auto").type == "cpu"


def test_auto_on_windows(
    gpu: dict[str, bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """WSL 2 has /dev/dxg for a GPU of any vendor, and libcuda of NVIDIA's driver alone."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (tmp_path / "dxg").touch()
    (tmp_path / "wsl").mkdir()
    assert open_device("auto").type == "cpu"
    (tmp_path / "wsl" / "libcuda.so.1").touch()
    with pytest.raises(Unservable, match=r"libcuda.so.1\), and this torch cannot use it"):
        open_device("auto")


def test_products_are_summed_in_float32(gpu: dict[str, bool]) -> None:
    """Whatever the variables of a container, and torch's defaults, allow."""
    products = torch.backends.cuda.matmul
    names = ("tf32", "bf16_reduced_precision_reduction", "fp16_reduced_precision_reduction")
    before = [getattr(products, f"allow_{name}") for name in names]
    gpu["available"] = True
    try:
        for name in names:
            setattr(products, f"allow_{name}", True)
        open_device("cuda")
        assert [getattr(products, f"allow_{name}") for name in names] == [False] * 3
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(products, f"allow_{name}", value)


def test_no_import_asks_the_driver() -> None:
    """It is lost in a fork afterwards, and a fork server imports what a worker does."""
    program = """if True:
        import sys
        import torch

        asked = []
        for name in ("is_available", "device_count", "_lazy_init", "get_device_capability"):
            setattr(torch.cuda, name, lambda *given, name=name: asked.append(name))
        from kvrelay.cluster import spawn
        for module in spawn.PRELOADED:
            __import__(module)
        from kvrelay.engine.model.loading import load_model
        load_model(sys.argv[1], device="cpu")
        print(asked)
    """
    done = subprocess.run(
        [sys.executable, "-c", program, SHIPPED_MODEL], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "flags"),
    [
        ("prefill_service", ("--model", SHIPPED_MODEL)),
        ("kvrelay.worker.check", ("--model", SHIPPED_MODEL)),
        ("kvrelay", ("doctor",)),
    ],
)
def test_others_are_hidden_before_the_driver_is_asked(
    tmp_path: Path, module: str, flags: tuple[str, ...]
) -> None:
    """It reads CUDA_VISIBLE_DEVICES once. With flash_attn, `transformers` asks it when imported."""
    (tmp_path / "flash_attn.py").touch()
    about = tmp_path / "flash_attn-2.8.3.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    (about / "RECORD").write_text("flash_attn.py,,\n")
    program = """if True:
        import os, runpy, sys, traceback
        import torch

        asked = []
        def ask(*given):
            importing = any("transformers" in frame.filename for frame in traceback.extract_stack())
            asked.append((importing, os.environ.get("CUDA_VISIBLE_DEVICES")))
            return 0
        for name in ("is_available", "device_count", "_lazy_init", "get_device_capability"):
            setattr(torch.cuda, name, ask)
        del sys.argv[0]
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit:
            print("asked", *asked[0])
    """
    done = subprocess.run(
        [sys.executable, "-c", program, module, *flags, "--device", "cuda:1"],
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
            VISIBLE: "5, GPU-1f3a",
        },
    )
    assert "no CUDA device is available" in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "asked True GPU-1f3a"


@pytest.mark.parametrize(
    ("limit", "contexts"),
    [
        (40, [512]),
        (512, [512]),
        (513, [512, 513]),
        (4096, [512, 2048, 4096]),
        (32768, [512, 2048, 8192, 32768]),
    ],
)
def test_the_last_graphs_are_as_long_as_a_context_may_be(limit: int, contexts: list[int]) -> None:
    assert GraphLimits(8, limit).contexts() == contexts


def test_a_numeric_profile_names_the_whole_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of one capability have different numbers of multiprocessors."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    named = [
        "CUBLAS_EMULATE_SINGLE_PRECISION=1",
        "CUBLAS_EMULATION_STRATEGY=eager",
        "CUBLAS_WORKSPACE_CONFIG=:4096:8",
        "CUBLASLT_WORKSPACE_SIZE=64",
        "NVIDIA_TF32_OVERRIDE=0",
        "PYTORCH_TUNABLEOP_ENABLED=1",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1",
        "TORCH_BLAS_PREFER_CUBLASLT=1",
    ]
    for variable in (*named, "ONEDNN_MAX_CPU_ISA=AVX2"):
        monkeypatch.setenv(*variable.split("="))
    first, *parts = kernels(torch.device("cuda"))
    assert first == f"cuda-{torch.version.cuda}-sm90"
    assert parts[0] == "NVIDIA-H100-PCIe"
    assert sorted(parts[1:-1]) == sorted(named)
    assert parts[-1].startswith("torch-")


def test_one_of_several(gpu: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The process sees that one alone; the number counts those that it saw before."""
    for name in ("auto", "cpu", "cuda"):
        assert show_one(name) == name
    assert VISIBLE not in os.environ
    assert show_one("cuda:2") == "cuda"
    assert os.environ[VISIBLE] == "2"
    monkeypatch.setenv(VISIBLE, "5, GPU-1f3a")
    assert show_one("cuda:1") == "cuda"
    assert os.environ[VISIBLE] == "GPU-1f3a"
    with pytest.raises(Unservable, match="cuda:1: CUDA_VISIBLE_DEVICES shows 'GPU-1f3a' alone"):
        show_one("cuda:1")
    with pytest.raises(Unservable, match=r"this torch with CUDA_VISIBLE_DEVICES=GPU-1f3a: torch"):
        open_device("cuda")


def test_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads may call CUDA during a capture; after it the current stream is as before.

    What is captured has run once before: a capture compiles nothing and creates no cuBLAS.
    """
    seen: list[object] = []

    @contextmanager
    def noted(*what: object, **named: object) -> Iterator[None]:
        seen.append((*what, *named.values()))
        yield
        seen.append("left")

    made = object()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "steps")
    monkeypatch.setattr(torch.cuda, "stream", noted)
    monkeypatch.setattr(torch.cuda, "graph", noted)
    assert CudaGraphs().capture(lambda: seen.append("launched")) is made
    inner = (made, "pool", "thread_local")
    assert seen == ["launched", ("steps",), inner, "launched", "left", "left"]


def test_torch_still_stays_on_the_stream_of_a_failed_capture() -> None:
    """Once this fails, ``CudaGraphs`` need not set the stream again."""
    left: list[object] = []

    def refuse() -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    context = torch.cuda.graph.__new__(torch.cuda.graph)
    vars(context).update(
        _enable_annotations=False,
        cuda_graph=SimpleNamespace(capture_end=refuse),
        stream_ctx=SimpleNamespace(__exit__=left.append),
    )
    with pytest.raises(RuntimeError, match="previous error"):
        context.__exit__(None, None, None)
    assert not left


@pytest.mark.parametrize("name", ["tpu", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "auto:1"])
def test_other_names(gpu: dict[str, bool], name: str) -> None:
    gpu["available"] = True
    with pytest.raises(Unservable, match="must be auto, cpu or cuda"):
        open_device(name)
    with pytest.raises(Rejected, match="choose one of auto, cpu, cuda, cuda:N"):
        _configured(name)


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:15"])
def test_names_of_the_option(name: str) -> None:
    assert _configured(name) == name


def _configured(name: str) -> str:
    return read(WorkerConfig, ["--model", "m", "--device", name], "worker", "", {}).device
