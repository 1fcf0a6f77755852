"""A whole model through FlashAttention's calls: stand-ins that compute what they are given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kvrelay.engine.model.loading import load_model
from kvrelay.engine.numerics import numeric_profile
from kvrelay.engine.runner import Runner
from kvrelay.sampling import Sampling
from tests.engine.flash import standins
from tests.engine.flash.checks import LIBRARIES
from tests.engine.torch.drive import Oracle, generate, prompts
from tests.models import VOCAB, tiny_model

SIZE = 256


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", ["qwen3", "gpt-neox"])
def test_greedy_tokens_of_a_model(
    standing_in: None, tmp_path: Path, kind: str, library: str
) -> None:
    """Our forward pass and transformers': loaded and probed with the backend, chunks and mixes."""
    path = tiny_model(kind, tmp_path / kind, hidden_size=64)
    loaded = load_model(path, "float32", "cpu", attention_backend=library)
    runner = Runner(loaded, 12, SIZE, library)
    runner.pool.tensor.fill_(torch.nan)
    asked = prompts(3, [300, 5, 21], VOCAB)
    oracle = Oracle(path)
    made = generate(runner, asked, 6, chunk=200, seed=1)
    got = [stream.tokens[stream.prompt_len :] for stream in made]
    assert got == [oracle.generate(prompt, 6) for prompt in asked]


@pytest.mark.parametrize("library", LIBRARIES)
def test_sampling_is_that_of_other_backends(
    standing_in: None, tmp_path: Path, library: str
) -> None:
    """The numbers of the sampler come with the step's upload."""
    loaded = load_model(tiny_model("llama", tmp_path / "llama", hidden_size=64), "float32", "cpu")
    asked, sampling = prompts(4, [40, 7], VOCAB), Sampling(temperature=0.9, top_p=0.8, seed=5)
    results = []
    for name in (library, "sdpa"):
        made = generate(Runner(loaded, 6, SIZE, name), asked, 8, sampling=sampling, chunk=20)
        results.append([stream.tokens for stream in made])
    assert results[0] == results[1]


def test_the_profile_names_the_library(
    standing_in: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its version too: another one has other bits."""
    loaded = load_model(tiny_model("llama", tmp_path / "llama", hidden_size=64), "float32", "cpu")
    found = {name: numeric_profile(loaded, name, None) for name in (*LIBRARIES, "sdpa")}
    assert "/varlen-1/" in found["varlen"]
    assert "/flash_attn-1-2.8.3.post2/" in found["flash_attn"]
    assert len({profile.split("/tp1/")[0] for profile in found.values()}) == 3
    module = standins.flash_attn_module()
    module.__dict__["__version__"] = "2.9.0"
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    assert "/flash_attn-1-2.9.0/" in numeric_profile(loaded, "flash_attn", None)
