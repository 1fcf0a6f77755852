"""``kvrelay doctor --device``: what holds, what a mistake changes, and what is printed."""

from __future__ import annotations

import json

import pytest
import torch

from kvrelay.cli.doctor import device
from kvrelay.cli.doctor.command import main
from kvrelay.engine.attention.pool import PoolShape
from kvrelay.engine.self_test import DeviceCheck, SelfTest, same_as_sdpa
from tests.engine.cuda.processes import SECONDS, interpreted, needs_a_gpu, needs_triton, on_device

# The best way, and the checks that do not hold.
CASES = {
    "right": ("graphs", []),
    "stale": ("triton", ["graphs"]),
    "refusing": ("triton", ["graphs"]),
    "attention": ("sdpa", ["attention bfloat16", "attention float32", "model"]),
    "segments": ("sdpa", ["attention bfloat16", "attention float32"]),
    "copies": ("graphs", ["blocks"]),
}


@needs_triton
@pytest.mark.triton
@pytest.mark.timeout(SECONDS + 10)
@pytest.mark.parametrize("case", CASES)
def test_mistakes_of_a_device(case: str) -> None:
    way, failed = CASES[case]
    *_, worker, doctor = interpreted("self_tests", case).splitlines()
    assert doctor == f"way {way}; failed {failed}"
    if case == "copies":
        assert worker.startswith("a worker refuses: this GPU does not copy KV blocks")
        return
    name = way.replace("graphs", "triton with CUDA graphs")
    assert worker == f"a worker computes with {name}: rows-same cuts-same"


@pytest.mark.gpu
@pytest.mark.triton
@needs_a_gpu
def test_a_gpu() -> None:
    """Its own graphs, streams and memory; the programs print what was found."""
    *_, worker, doctor = on_device("self_tests", "right").splitlines()
    assert doctor == "way graphs; failed []"
    assert worker.startswith("a worker computes with triton with CUDA graphs: ")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 256])
def test_attention_is_compared_at_any_block_size(size: int) -> None:
    shape = PoolShape(1, 2, size, 2, 64, "float32")
    assert same_as_sdpa(torch.device("cpu"), shape, 4, "sdpa") == (
        True,
        "differs from SDPA by 0.0e+00 of a row's largest at most",
    )


def test_without_a_device_the_way_is_sdpa(capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU: the reason is told, as JSON that a user can send."""
    assert main(["--device", "cpu", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["way"] == "sdpa"
    assert told["device"].endswith(tuple("0123456789+cpu"))
    found = {check["name"]: check for check in told["checks"]}
    holds = {name: check["holds"] for name, check in found.items()}
    assert holds == {"triton": False, "varlen": None, "flash_attn": None}
    assert told["reasons"] == [f"{name}: {check['found']}" for name, check in found.items()]
    assert told["reasons"][1].startswith("varlen: cannot be used: its kernels run on a CUDA")
    assert told["versions"]["torch"] == torch.__version__
    assert told["memory"] == []


def test_without_cuda_the_error_is_json_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--device", "cuda", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["device"] == "cuda"
    assert "no CUDA device is available to this torch" in told["error"]
    assert set(told["versions"]) == {"kvrelay", "torch", "triton", "flash_attn"}


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--device", "tpu"])
    assert ended.value.code == 2
    assert "choose one of auto, cpu, cuda, cuda:N" in capsys.readouterr().err


def test_lines() -> None:
    checks = (
        DeviceCheck("graphs", False, "refused"),
        DeviceCheck("rows", None, "equal"),
        DeviceCheck("x", True, "y"),
    )
    text = "\n".join(device.lines(SelfTest(checks), "cuda-13.0-sm90"))
    assert text.startswith("cuda-13.0-sm90\n")
    assert "graphs             refused" in text
    assert text.endswith("Best way of computing here: triton.")
