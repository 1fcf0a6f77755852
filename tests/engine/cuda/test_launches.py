"""What a step launches on a GPU, counted on fake CUDA tensors with the real runner."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.engine.cuda.processes import needs_triton, plain

pytestmark = [needs_triton, pytest.mark.triton]
LAYER = {"decode": 10, "prefill": 9, "mixed": 11}
COPIES = 4  # tokens, positions, rows of logits; spans, slots and tables in one


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ for the guard of fake devices")
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "qwen3", "mistral"])
def test_launches_and_copies_of_a_step(kind: str) -> None:
    steps = [json.loads(line) for line in plain("launches", kind).splitlines()]
    assert {step["step"]: step["layer"] for step in steps} == LAYER
    for step in steps:
        assert step["copies"] == COPIES, step
        assert step["rest"] <= 40, step
