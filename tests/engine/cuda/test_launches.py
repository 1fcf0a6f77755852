"""What a step launches on a GPU, counted on fake CUDA tensors with the real runner."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.engine.cuda.processes import needs_triton, plain

pytestmark = [needs_triton, pytest.mark.triton]
MOST = 12
LAYER = {"decode": 10, "drawn": 10, "all options": 10, "prefill": 9, "mixed": 11}
# Philox is about 150 of them, the search for top-p 180, the log probabilities of 64 rows 6 each.
SAMPLING = {"decode": 3, "drawn": 190, "all options": 850, "prefill": 3, "mixed": 3}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ for the guard of fake devices")
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "qwen3", "mistral"])
def test_launches_and_copies_of_a_step(kind: str) -> None:
    """One copy to the device and one back, whatever is sampled, and no wait before."""
    steps = [json.loads(line) for line in plain("launches", kind).splitlines()]
    assert {step["step"]: step["layer"] for step in steps} == LAYER
    assert max(LAYER.values()) <= MOST
    for step in steps:
        assert step["up"] == step["down"] == 1, step
        assert step["rest"] <= 40, step
        assert step["sampling"] <= SAMPLING[step["step"]], step


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ for the guard of fake devices")
def test_a_step_with_the_attention_of_torch() -> None:
    """The real ``varlen_attn``, and the forward pass of the CPU: as many copies, more launches."""
    for step in [json.loads(line) for line in plain("launches", "qwen3", "varlen").splitlines()]:
        assert step["up"] == step["down"] == 1, step
        assert step["layer"] <= (40 if step["step"] == "mixed" else 39), step
        assert step["rest"] <= 40, step
        assert step["sampling"] <= SAMPLING[step["step"]], step
