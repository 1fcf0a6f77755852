"""Driving a runner without a scheduler: chunks, scattered blocks and mixed batches by a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvrelay.engine.core.updates import Sampled, Work
from kvrelay.engine.runner import Runner
from kvrelay.sampling import Sampling

GREEDY = Sampling(temperature=0.0)


@dataclass
class Stream:
    """One sequence, with the state that a scheduler would keep."""

    tokens: list[int]
    prompt_len: int
    blocks: list[int]
    sampling: Sampling
    computed: int = 0
    sampled: list[Sampled] = field(default_factory=list)

    def work(self, count: int) -> Work:
        """The next ``count`` positions; samples when they are the last known ones."""
        wanted = self.sampling if self.computed + count == len(self.tokens) else None
        return Work(self.tokens, self.computed, count, self.blocks, self.prompt_len, wanted)

    def commit(self, count: int, sampled: Sampled | None) -> None:
        """Take a step's answer."""
        self.computed += count
        if sampled is not None:
            self.tokens.append(sampled.token)
            self.sampled.append(sampled)


def streams(
    runner: Runner, prompts: Sequence[Sequence[int]], new: int, sampling: Sampling, seed: int
) -> list[Stream]:
    """One stream for each prompt, with blocks in shuffled, non-contiguous order."""
    free = list(range(runner.pool.shape.num_blocks))
    random.Random(seed).shuffle(free)
    made = []
    for prompt in prompts:
        need = -(-(len(prompt) + new) // runner.pool.shape.block_size)
        made.append(Stream(list(prompt), len(prompt), free[:need], sampling))
        del free[:need]
    return made


def generate(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    new: int,
    *,
    sampling: Sampling = GREEDY,
    chunk: int = 1 << 30,
    seed: int = 0,
) -> list[Stream]:
    """Run all prompts to ``new`` tokens: random order, random subsets, chunks of 1 to ``chunk``."""
    rng = random.Random(seed)
    made = streams(runner, prompts, new, sampling, seed)
    positions = 0
    while open_ := [s for s in made if len(s.sampled) < new]:
        batch = rng.sample(open_, rng.randint(1, len(open_)))
        counts = [min(len(s.tokens) - s.computed, rng.randint(1, chunk)) for s in batch]
        before = runner.executed_positions
        answers = runner.execute([s.work(n) for s, n in zip(batch, counts, strict=True)])
        positions += sum(counts)
        assert runner.executed_positions - before == sum(counts)
        for stream, count, answer in zip(batch, counts, answers, strict=True):
            assert (answer is not None) == (stream.computed + count == len(stream.tokens))
            stream.commit(count, answer)
    assert positions == sum(len(p) + new - 1 for p in prompts)
    return made


def prompts(seed: int, lengths: Sequence[int], vocab: int) -> list[list[int]]:
    """Random prompts of the given lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


class _Generates(Protocol):
    def __call__(self, inputs: torch.Tensor, **options: object) -> torch.Tensor: ...


class Oracle:
    """Plain `transformers`, one prompt at a time."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = cast(PreTrainedModel, AutoModelForCausalLM.from_pretrained(path, dtype=dtype))

    def generate(self, prompt: Sequence[int], new: int) -> list[int]:
        """The ``new`` tokens of greedy ``generate``, whatever ends a text."""
        run = cast(_Generates, self.model.generate)
        inputs = torch.tensor([list(prompt)])
        out = run(
            inputs,
            attention_mask=torch.ones_like(inputs),  # else guessed: prompts may hold the pad token
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Float32 logits [len(tokens), vocab]."""
        with torch.inference_mode():
            out: torch.Tensor = self.model(torch.tensor([list(tokens)])).logits[0]
        return out.float()
