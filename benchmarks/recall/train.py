"""`python -m benchmarks.recall.train --out DIR`: construct, train on fresh text, measure, save.

Seeded; some minutes on 2 cores. The construction finds the facts, the training teaches it to
speak, to stop, and to hold over all lengths and wordings.
"""

import argparse
import math
import time
from itertools import islice
from pathlib import Path
from random import Random
from typing import Final

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.recall.batches import DocumentLengths, TrainingBatch, batches
from benchmarks.recall.construct import construct
from benchmarks.recall.evaluate import RecallScore, evaluate
from benchmarks.recall.tokenizer import build, save

LENGTHS: Final = DocumentLengths(fewest=4, most=420, budget=5000)
RATE: Final = 1e-3
WARM_UP: Final = 50


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, seed: int, steps: int
) -> None:
    """Run `steps` steps of Adam in place, with a line of progress every 50."""
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    fresh = batches(tokenizer, Random(seed), LENGTHS)
    start = time.monotonic()
    model.train()
    for step, batch in enumerate(islice(fresh, steps), 1):
        mean, correct = loss(model, batch)
        mean.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == steps:
            print(
                f"step {step}/{steps}  loss {mean.item():.4f}  answer tokens right "
                f"{correct:.4f}  {time.monotonic() - start:.0f} s",
                flush=True,
            )
    model.train(False)


def rate(step: int, steps: int) -> float:
    """The learning rate as a share of the highest: a short rise, then half a cosine."""
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))


def loss(model: LlamaForCausalLM, batch: TrainingBatch) -> tuple[Tensor, float]:
    """The weighted mean cross-entropy, and the share of answer tokens that are predicted."""
    logits = model(batch.ids).logits[:, :-1].flatten(0, 1)
    targets, weights = batch.ids[:, 1:].flatten(), batch.weights[:, 1:].flatten()
    each = nn.functional.cross_entropy(logits, targets, reduction="none")
    correct = (logits.argmax(1) == targets)[weights == 1].float().mean()
    return (each * weights).sum() / weights.sum(), correct.item()


def make(seed: int, steps: int, out: Path) -> RecallScore:
    """The whole making, from the seed to the files in `out`."""
    tokenizer = build()
    model = construct(tokenizer, seed)
    train(model, tokenizer, seed=seed, steps=steps)
    model.save_pretrained(str(out))
    save(out)
    return evaluate(model, tokenizer, questions=500, tokens=1000)


def main() -> None:
    """Make the recall model and write it into a folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"seed {options.seed}")
    print(make(options.seed, options.steps, options.out).lines())


if __name__ == "__main__":
    main()
