"""What holds of the arguments of FlashAttention's calls: the real backend over stand-ins.

The modules are arguments, so that the same checks can be given modules with a mistake.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import ModuleType

import torch

from kvrelay.engine.attention.batch import Batch, pack
from kvrelay.engine.attention.pool import DTYPES, KVPool, PoolShape
from kvrelay.engine.attention.sdpa import SdpaBackend
from kvrelay.engine.core.updates import Work
from kvrelay.engine.cuda.arguments import AttentionOptions
from kvrelay.sampling import Sampling
from tests.engine.flash import standins
from tests.engine.native.rig import Problem, reference

LIMITS = {"float32": 1e-5, "bfloat16": 0.03}  # of attention, numbers of about 1
LIBRARIES = ("varlen", "flash_attn")
STEPS = 4


@dataclass(frozen=True, slots=True)
class Modules:
    """``flash_calls`` and ``flash_backend``."""

    calls: ModuleType
    backend: ModuleType

    def open(self, library: str, pool: KVPool, options: AttentionOptions) -> object:
        """A backend over the stand-ins of a library."""
        made = (
            self.calls.VarlenCalls(standins.varlen_attn, options)
            if library == "varlen"
            else self.calls.FlashAttnCalls(
                standins.flash_attn_varlen_func,
                standins.flash_attn_with_kvcache,
                "2.8.3.post2",
                options,
            )
        )
        return self.backend.FlashBackend(pool, made)


@dataclass(frozen=True, slots=True)
class Rows:
    """Q, K and V of the rows of a step."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Sequences:
    """Sequences that grow in chunks and single positions, in blocks of a shuffled pool."""

    def __init__(self, rng: random.Random, size: int) -> None:
        self._rng = rng
        lengths = [rng.choice((1, 2, 40, size - 1, size + 1, 2 * size + 30)) for _ in range(4)]
        tables = [-(-(length + 2 * STEPS) // size) for length in lengths]
        free = list(range(sum(tables) + 2))  # two blocks are nobody's
        self.blocks = len(free)
        rng.shuffle(free)
        self._tables = [[free.pop() for _ in range(count)] for count in tables]
        self._left = lengths
        self._done = [0] * len(lengths)

    def works(self) -> list[Work]:
        """Some of them, in any order: prompts whole or in part, then one position each."""
        made = []
        chosen = self._rng.sample(range(len(self._left)), self._rng.randint(1, len(self._left)))
        for number in chosen:
            left, start = self._left[number], self._done[number]
            count = self._rng.choice((left, self._rng.randint(1, left))) if left else 1
            tokens = [self._rng.randrange(100) for _ in range(start + count)]
            sampling = self._rng.choice((None, Sampling()))
            made.append(Work(tokens, start, count, self._tables[number], 1, sampling))
            self._done[number] += count
            self._left[number] -= min(count, left)
        return made


def random_batches(modules: Modules, library: str, seed: int) -> None:
    """Every step's results beside SDPA's, and what is stored: nowhere else, and in the same way."""
    rng = random.Random(seed)
    size, dtype = rng.choice((256, 512)), rng.choice(tuple(LIMITS))
    group, heads, width = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((8, 16, 40))
    sequences = Sequences(rng, size)
    shape = PoolShape(sequences.blocks, 2, size, heads, width, dtype)
    mine, theirs = KVPool(shape), KVPool(shape)
    mine.tensor.fill_(torch.nan)  # what no position fills must not matter
    opened = modules.open(library, mine, AttentionOptions())
    told = f"{library} {dtype} block {size} group {group} heads {heads} of {width}, seed {seed}"
    for _ in range(STEPS):
        batch = pack(sequences.works(), size)
        rows = _rows(rng, batch, shape, group)
        scaling = rng.choice((None, 0.3))
        steps = (opened.step(batch), SdpaBackend(theirs).step(batch))  # type: ignore[attr-defined]
        assert torch.equal(steps[0].inputs.tokens.long(), steps[1].inputs.tokens)
        assert torch.equal(steps[0].inputs.positions.long(), steps[1].inputs.positions)
        assert torch.equal(steps[0].inputs.rows.long(), steps[1].inputs.rows)
        for layer in rng.sample(range(2), 2):
            given = (layer, rows.query, rows.key, rows.value, scaling)
            got, want = (step.attend(*given) for step in steps)
            assert got.is_contiguous()
            error = (got.double() - want.double()).abs().max().item()
            assert error < LIMITS[dtype], f"{told}: off by {error}"
        stored = ~mine.tensor.isnan()
        assert torch.equal(mine.tensor[stored], theirs.tensor[stored]), told
        assert not theirs.tensor[~stored].any(), told
    assert bool((~mine.tensor.isnan()).any())


def random_options(modules: Modules, library: str, seed: int) -> None:
    """Windows, and soft caps where there are any, beside float64."""
    rng = random.Random(seed)
    sequences = Sequences(rng, 256)
    shape = PoolShape(sequences.blocks, 2, 256, 2, 16, "float32")
    pool = KVPool(shape)
    pool.tensor.fill_(torch.nan)
    window = rng.choice((0, 1, 2, 30, 256, 300))
    cap = rng.choice((0.0, 2.0, 5.0)) if library == "flash_attn" else 0.0
    opened = modules.open(library, pool, AttentionOptions(window, cap))
    for _ in range(STEPS):
        batch = pack(sequences.works(), 256)
        rows = _rows(rng, batch, shape, 2)
        step = opened.step(batch)  # type: ignore[attr-defined]
        got = step.attend(1, rows.query, rows.key, rows.value, 0.7)
        problem = Problem(pool.by_position, 2, 0.7, 1, window, cap)
        for place, (first, start, count, _) in enumerate(batch.spans.tolist()):
            here = slice(first, first + count)
            want = reference(problem, (start, count, _table(batch, place, 256)), rows.query[here])
            error = (got[here].double() - want).abs().max().item()
            assert error < 1e-5, f"{library} window {window} cap {cap}, seed {seed}: {error}"


def _table(batch: Batch, place: int, size: int) -> list[int]:
    _, start, count, first = batch.spans[place].tolist()
    blocks: list[int] = batch.blocks[first : first - (start + count) // -size].tolist()
    return blocks


def _rows(rng: random.Random, batch: Batch, shape: PoolShape, group: int) -> Rows:
    """Views of one product, aligned or not, as a model's forward pass has them."""
    heads, width = shape.num_kv_heads, shape.head_dim
    generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
    spare = rng.choice((0, 0, 1))  # numbers behind the last head of a row
    columns = (group + 2) * heads * width + spare
    joint = torch.randn((len(batch.tokens), columns), generator=generator).to(DTYPES[shape.dtype])
    cut = joint[:, spare:].view(len(joint), -1, width)
    queries = group * heads
    return Rows(cut[:, :queries], cut[:, queries : queries + heads], cut[:, queries + heads :])
