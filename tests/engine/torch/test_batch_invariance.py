"""KV and logits are the same to the bit wherever a prompt is cut and whatever is beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from kvrelay.engine.attention.index import keys_computed, queries_computed
from kvrelay.engine.attention.pool import DTYPES
from kvrelay.engine.core.updates import Logprob, Work
from kvrelay.engine.model.loading import LoadedModel, load_model
from kvrelay.engine.runner import Runner
from kvrelay.sampling import Sampling
from tests.engine.torch.drive import prompts
from tests.models import KINDS, VOCAB, tiny_model

TOP = Sampling(temperature=0.0, logprobs=VOCAB)
LENGTHS = (1, 2, 33, 150, 201, 391, 530, 700)  # runs of 32 queries and 512 keys, 193 to 383 keys
BACKENDS = ("sdpa", "native")
EXPERTS = ("mixtral", "qwen3-moe")  # each expert computes as many rows as chose it
FEW = [("llama", "float32"), ("llama-mha", "float32"), ("gpt2", "float32"), ("qwen3", "bfloat16")]


def computed(
    runner: Runner, tokens: Sequence[int], counts: Sequence[int], beside: Sequence[Work]
) -> tuple[torch.Tensor, tuple[Logprob, ...]]:
    """KV of all positions, and all log probabilities after the last, computed in such counts."""
    size = runner.pool.shape.block_size
    table = list(range(len(tokens) // size, -1, -1))
    start, answers = 0, []
    for count in counts:
        wanted = TOP if start + count == len(tokens) else None
        work = Work(tokens, start, count, table, len(tokens), wanted)
        answers = runner.execute([*beside, work])
        start += count
    assert start == len(tokens)
    assert answers[-1] is not None
    kv = runner.pool.tensor[table].transpose(0, 2).flatten(2, 3)  # [k|v, layer, position, ..
    return kv[:, :, : len(tokens)].clone(), answers[-1].top


def cuts(rng: random.Random, length: int) -> Iterator[list[int]]:
    """Ways to cut so many positions: token by token at the end, and by chance."""
    ones = min(length, 40)
    yield [length - ones] * (length > ones) + [1] * ones
    for most in (4, 60, 300):
        counts: list[int] = []
        while (left := length - sum(counts)) > 0:
            counts.append(min(left, rng.randint(1, most)))
        yield counts


def neighbours(rng: random.Random, runner: Runner) -> list[Work]:
    """Decode entries and a chunk of other sequences, in the last blocks of the pool."""
    made, free, size = [], runner.pool.shape.num_blocks, runner.pool.shape.block_size
    for _ in range(rng.randint(0, 3)):
        length = rng.randint(2, 600)
        (tokens,) = prompts(rng.randrange(1 << 31), [length], VOCAB)
        free -= length // size + 1
        table = list(range(free, free + length // size + 1))
        runner.execute([Work(tokens, 0, length, table, length, None)])
        count = rng.choice((1, 1, rng.randint(1, length)))
        made.append(Work(tokens, length - count, count, table, length, TOP))
    return made


def check(
    loaded: LoadedModel, block_size: int, threads: int, seed: int, attention: str = "sdpa"
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    runner = Runner(loaded, 3200 // block_size, block_size, attention, threads)
    for tokens in prompts(seed, LENGTHS, VOCAB):
        kv, top = computed(runner, tokens, [len(tokens)], ())
        assert len(top) == VOCAB
        for counts in cuts(rng, len(tokens)):
            beside = neighbours(rng, runner)
            kv_cut, top_cut = computed(runner, tokens, counts, beside)
            told = f"{len(tokens)} tokens cut into {counts}, {len(beside)} beside them"
            assert torch.equal(kv_cut, kv), told
            assert top_cut == top, told


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize(("kind", "dtype"), FEW)
def test_models(compiled: None, tmp_path: Path, kind: str, dtype: str, attention: str) -> None:
    path = tiny_model(kind, tmp_path / kind, DTYPES[dtype])
    check(load_model(path, dtype, "cpu"), 16, 1, random.randrange(1 << 31), attention)


@pytest.mark.slow
@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in EXPERTS])
def test_every_dense_model(
    compiled: None, tmp_path: Path, kind: str, dtype: str, attention: str
) -> None:
    test_models(compiled, tmp_path, kind, dtype, attention)


@pytest.mark.slow
@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 12])
def test_sizes_of_blocks_and_two_threads(
    compiled: None, tmp_path: Path, block_size: int, attention: str
) -> None:
    """Half a row of the feed-forward, where two threads meet, is a multiple of 32."""
    path = tiny_model("llama", tmp_path / "llama", intermediate_size=128)
    check(load_model(path, "float32", "cpu"), block_size, 2, random.randrange(1 << 31), attention)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_and_two_threads(compiled: None, tmp_path: Path, dtype: str) -> None:
    """KV and logits of the native kernel, whole on one thread and cut on two beside others.

    Each thread's part of a feed-forward row is a multiple of 32 (docs/failures.md).
    """
    path = tiny_model("llama", tmp_path / "llama", DTYPES[dtype], intermediate_size=256)
    loaded = load_model(path, dtype, "cpu")
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    (tokens,) = prompts(seed, [700], VOCAB)
    before = torch.get_num_threads()
    try:
        kv, top = computed(Runner(loaded, 200, 16, "native", 1), tokens, [700], ())
        runner = Runner(loaded, 200, 16, "native", 2)
        for counts in ([700], [513, 60, 126, 1], [300, 400]):
            again = computed(runner, tokens, counts, neighbours(rng, runner))
            assert torch.equal(again[0], kv), counts
            assert again[1] == top, counts
    finally:
        torch.set_num_threads(before)


def test_the_sizes() -> None:
    assert [queries_computed(n) for n in (1, 3, 4, 7, 32, 33, 35, 36, 64)] == [
        *(4, 4, 4, 7, 32, 36, 36, 36, 64)
    ]
    assert [keys_computed(n) for n in (1, 16, 17, 192, 193, 384, 385, 512, 513, 705)] == [
        *(16, 16, 32, 192, 384, 384, 400, 512, 528, 896)
    ]
