"""The numeric profile: stable, bounded, and different where the arithmetic is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvrelay.engine.attention.backend import AttentionStep
from kvrelay.engine.model.loading import load_model
from kvrelay.engine.numerics import LONGEST, numeric_profile
from kvrelay.engine.runner import Runner
from tests.engine.torch.conftest import Pair
from tests.models import KINDS, tiny_model

CHILD = """
import sys
from kvrelay.engine.model.loading import load_model
from kvrelay.engine.numerics import numeric_profile
print(numeric_profile(load_model(sys.argv[1], "float32", "cpu"), "sdpa", 1))
"""


class Counted:
    """A model that counts its forward passes and their positions."""

    def __init__(self, pair: Pair) -> None:
        self.loaded = replace(pair[0], forward=self)
        self.steps: list[int] = []
        self._inner = pair[0].forward

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        self.steps.append(tokens.shape[1])
        return self._inner.logits(tokens, positions, step, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_stable_and_bounded(pair: Callable[[str], Pair], kind: str) -> None:
    """Three forward passes, whatever the model; the chunks, then single positions."""
    counted = Counted(pair(kind))
    before = numeric_profile(counted.loaded, "auto", None)
    assert numeric_profile(counted.loaded, "auto", None) == before
    assert len(counted.steps) == 6
    assert counted.steps[:3] == counted.steps[3:]
    assert sum(counted.steps[:3]) <= LONGEST + LONGEST // 2


def test_it_leaves_a_workers_pool_alone(pair: Callable[[str], Pair]) -> None:
    loaded, _ = pair("llama")
    runner = Runner(loaded, num_blocks=8, block_size=16)
    runner.pool.tensor.fill_(3.0)
    numeric_profile(loaded, "auto", None)
    assert runner.executed_positions == 0
    assert bool((runner.pool.tensor == 3.0).all())


def test_a_shorter_maximum_length_is_the_same_profile(tmp_path: Path) -> None:
    """Workers of one fleet may be given different ``--max-model-len``."""
    path = tiny_model("llama", tmp_path / "llama")
    profiles = [
        numeric_profile(load_model(path, "float32", "cpu", length), "auto", 1)
        for length in (None, 20)
    ]
    assert profiles[0] == profiles[1]


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"),
    reason="needs a CPU with more than one instruction set that PyTorch tells apart",
)
def test_another_process_has_it_and_another_instruction_set_has_not(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path / "llama")

    def of_child(**environ: str) -> str:
        command = [sys.executable, "-c", CHILD, str(path)]
        done = subprocess.run(
            command, env={**os.environ, **environ}, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    here = numeric_profile(load_model(path, "float32", "cpu"), "sdpa", 1)
    assert of_child() == here
    other = of_child(ATEN_CPU_CAPABILITY="avx2")
    assert "AVX2" in other
    assert other.rpartition("/")[2] != here.rpartition("/")[2]
    assert of_child(ONEDNN_MAX_CPU_ISA="AVX2") != here
