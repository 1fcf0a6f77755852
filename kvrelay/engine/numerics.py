"""The numeric profile: what decides the bits of a KV block besides the weights.

It names the configuration (engine, device, instruction set, kernel versions, attention backend, TP
degree) and ends with a digest of what a probe computed on this machine: the KV and the logits of
two fixed prompts in fixed cuts. The configuration tells apart what the probe is too short to see,
and the probe what the configuration does not name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
import transformers

from kvrelay.engine.attention.choice import least_block_size
from kvrelay.engine.attention.native.products import Products
from kvrelay.engine.core.updates import Work
from kvrelay.engine.kernels import kernels
from kvrelay.engine.model.forward import TransformersModel
from kvrelay.engine.model.loading import LoadedModel
from kvrelay.engine.runner import Runner
from kvrelay.sampling import Sampling

BLOCK = 16  # positions in a block of the probe's own pool
LONGEST = 48  # positions of the longer prompt: a large model pays for three short steps
DIGEST_BYTES = 8


def numeric_profile(
    model: LoadedModel,
    attention_backend: str,
    threads: int | None,
    verdict: Sequence[str] = (),
) -> str:
    """The profile of this process with this model; the options are those of its runner.

    ``verdict`` has the results of the self-test at start; empty parts are left out.

    The probe has a pool of its own, so the worker's pool stays as it is.
    """
    size = max(BLOCK, least_block_size(attention_backend))
    runner = Runner(model, 2 * -(LONGEST // -size), size, attention_backend, threads)
    parts = ["native", *kernels(model.device)]
    if isinstance(products := model.products, Products):
        parts.append(products.profile)
    if isinstance(model.forward, TransformersModel):  # its own forward pass, not ours
        parts.append(f"transformers-{transformers.__version__}")
    with torch.inference_mode():
        digest = _probe(model, runner)
    parts += [runner.attention_profile, *filter(None, verdict)]
    return "/".join([*parts, "tp1", digest])


def _probe(model: LoadedModel, runner: Runner) -> str:
    """The digest of the KV and logits of two prompts, cut into chunks and decode steps."""
    digest = hashlib.sha256()
    prompts = _prompts(model.info.vocab_size, min(LONGEST, model.info.position_limit or LONGEST))
    half, size = runner.pool.shape.num_blocks // 2, runner.pool.shape.block_size
    tables = (range(half), range(half, 2 * half))
    for cuts in _steps([len(prompt) for prompt in prompts]):
        works = [
            Work(tokens, start, count, table, len(tokens), Sampling())
            for tokens, table, (start, count) in zip(prompts, tables, cuts, strict=True)
            if count
        ]
        if works:
            logits = runner.compute(works).logits
            digest.update(logits.contiguous().cpu().view(torch.uint8).numpy().data)
    for tokens, table in zip(prompts, tables, strict=True):
        for first in range(0, len(tokens), size):
            count = min(size, len(tokens) - first)
            digest.update(runner.pool.read(table[first // size], count))
    return digest.hexdigest()[: 2 * DIGEST_BYTES]


def _prompts(vocab: int, longest: int) -> list[list[int]]:
    """A prompt of ``longest`` tokens and one of half as many, spread over the vocabulary."""
    return [
        [(7919 * i * i + 104729 * i + 31 * length) % vocab for i in range(length)]
        for length in (longest, max(longest // 2, 1))
    ]


def _steps(lengths: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Start and count of each prompt in each step: a large chunk, a small one, one position."""
    before = [0] * len(lengths)
    for left in (8, 1, 0):  # positions that remain after the step
        after = [max(length - left, done) for length, done in zip(lengths, before, strict=True)]
        yield [(done, end - done) for done, end in zip(before, after, strict=True)]
        before = after
