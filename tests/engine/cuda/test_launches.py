"""What a step launches on a GPU, counted on fake CUDA tensors with the real runner."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.engine.cuda.processes import needs_triton, plain
from tests.models import KINDS

pytestmark = [needs_triton, pytest.mark.triton]
needs_guard = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++ for the guard of fake devices"
)
DECODE = ("decode", "drawn", "all options", "structured")
OURS = {**dict.fromkeys(DECODE, 10), "prefill": 9, "mixed": 11}
"""Launches of a layer of our own forward pass: the bar is 12."""

OTHERS = {"gpt2": 19, "gpt-neox": 20, "lfm2": 54, "mixtral": 56, "qwen3-moe": 70}
"""Launches of a layer in decode where the forward pass is that of `transformers`.

A norm is eight operations of torch there (LFM2 has four in a layer), so is GPT-2's activation, and
experts are some twenty.
"""

EXPERTS = ("mixtral", "qwen3-moe")
# Philox is about 150 of them, the search for top-p 180, the log probabilities of 64 rows 6 each.
FEW = dict.fromkeys(("decode", "prefill", "mixed"), 3)
SAMPLING = {**FEW, "drawn": 190, "all options": 850, "structured": 20}
UPLOADS = {"structured": 2}  # the masks are computed during the forward pass


@needs_guard
@pytest.mark.parametrize("kind", KINDS)
def test_launches_and_copies_of_a_step(kind: str) -> None:
    """One copy to the device and one back, whatever is sampled, and no wait before.

    The masks of structured output are a second one.
    """
    steps = [json.loads(line) for line in plain("launches", kind).splitlines()]
    more = OTHERS.get(kind, OURS["decode"]) - OURS["decode"]
    layer = {name: count + more for name, count in OURS.items()}
    assert {step["step"]: step["layer"] for step in steps} == layer
    for step in steps:
        assert (step["up"], step["down"]) == (UPLOADS.get(step["step"], 1), 1), step
        assert step["waits"] == 0, step
        assert step["rest"] <= 40, step
        assert step["sampling"] <= SAMPLING[step["step"]], step


@needs_guard
@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("architecture", ["80", "90", "100", "120"])
def test_experts_wait_on_devices_without_a_grouped_product(kind: str, architecture: str) -> None:
    """Both grouped products of a layer do; what is uploaded and read back stays."""
    wait = 0 if architecture in ("90", "100") else 2
    for line in plain("launches", kind, "triton", architecture).splitlines():
        step = json.loads(line)
        assert step["waits"] == wait, step
        assert (step["up"], step["down"]) == (UPLOADS.get(step["step"], 1), 1), step


@needs_guard
def test_a_step_with_the_attention_of_torch() -> None:
    """The real ``varlen_attn``, and the forward pass of the CPU: as many copies, more launches."""
    for step in [json.loads(line) for line in plain("launches", "qwen3", "varlen").splitlines()]:
        assert (step["up"], step["down"]) == (UPLOADS.get(step["step"], 1), 1), step
        assert step["layer"] <= (40 if step["step"] == "mixed" else 39), step
        assert step["rest"] <= 40, step
        assert step["sampling"] <= SAMPLING[step["step"]], step
