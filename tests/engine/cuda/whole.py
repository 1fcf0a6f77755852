"""A whole model on the interpreted kernels beside the real runner: ``.. whole KIND DTYPE SEED``.

Both runners compute the same chunks and decode steps, mixed and in random order; each then goes on
with its own greedy tokens, which must be those of plain `transformers` in float32.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import torch

from tests.engine.cuda.interpreter import DEVICE, ORDER  # isort: skip (it comes before every kernel)

from kvrelay.engine.core.updates import Work
from kvrelay.engine.model.decoder import Decoder
from kvrelay.engine.model.fused_decoder import FusedDecoder
from kvrelay.engine.model.loading import load_model
from kvrelay.engine.runner import Runner
from tests.engine.torch.drive import GREEDY, Oracle, generate, prompts
from tests.models import VOCAB, tiny_model

# Largest difference of logits and of KV, as a share of the largest number.
LIMITS = {"float32": 2e-5, "bfloat16": 0.06}
BLOCKS, SIZE = 60, 7


def run(kind: str, dtype: str, seed: int) -> str:
    """Compare; returns what was seen."""
    ORDER.seed(seed)
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_model(kind, Path(folder) / kind, kinds[dtype], seed)
        loaded = load_model(path, dtype, str(DEVICE))
        ours = Runner(loaded, BLOCKS, SIZE, "triton")
        real = Runner(loaded, BLOCKS, SIZE, "sdpa")
        assert ours.attention_profile.startswith("triton-")
        assert isinstance(ours._forward, FusedDecoder) == isinstance(loaded.forward, Decoder)
        ours.pool.tensor.fill_(torch.nan)
        worst, tokens = _steps(ours, real, seed)
        assert worst < LIMITS[dtype], f"{kind} {dtype}: logits differ by {worst:.1e}"
        asked = prompts(seed, [30, 5, 21], VOCAB)
        if dtype == "float32":
            own = Oracle(path)
            made = generate(ours, asked, 6, chunk=8, seed=seed)
            got = [stream.tokens[stream.prompt_len :] for stream in made]
            assert got == [own.generate(prompt, 6) for prompt in asked], f"{kind}: {got}"
        return f"logits differ by {worst:.1e} of the largest; {tokens}"


def _steps(ours: Runner, real: Runner, seed: int) -> tuple[float, str]:
    """Both compute the same tokens; the largest difference of logits, and which tokens agree."""
    rng = random.Random(seed)
    texts = prompts(seed + 1, [37, 20, 61], VOCAB)
    free = rng.sample(range(BLOCKS), BLOCKS)
    tables = [[free.pop() for _ in range(12)] for _ in texts]
    done = [0] * len(texts)
    worst, alike, all_ = 0.0, 0, 0
    while done != [len(text) for text in texts]:
        works = []
        for number in rng.sample(range(len(texts)), rng.randint(1, len(texts))):
            left = len(texts[number]) - done[number]
            count = min(left, rng.choice((1, 1, rng.randint(1, 25))))
            if count and done[number] + count < len(texts[number]) + 1:
                works.append((number, count))
        if not works:
            continue
        asked = [
            Work(texts[n], done[n], count, tables[n], len(texts[n]), GREEDY) for n, count in works
        ]
        with torch.inference_mode():
            got, want = (runner.compute(asked).logits.float() for runner in (ours, real))
        worst = max(worst, ((got - want).abs().max() / want.abs().max()).item())
        alike += int((got.argmax(-1) == want.argmax(-1)).sum())
        all_ += len(want)
        for number, count in works:
            done[number] += count
    written = ~ours.pool.tensor.isnan()
    gap = (ours.pool.tensor.float() - real.pool.tensor.float())[written].abs().max()
    share = (gap / real.pool.tensor.float().abs().max()).item()
    positions = sum(done) * 2 * ours.pool.shape.num_layers
    assert int(written.sum()) == positions * ours.pool.shape.num_kv_heads * ours.pool.shape.head_dim
    return max(worst, share), f"{alike} of {all_} greedy tokens are equal"


if __name__ == "__main__":
    name, precision, number = sys.argv[1:]
    print(f"{name} {precision} (seed {number}): {run(name, precision, int(number))}")
