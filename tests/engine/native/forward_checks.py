"""Compares a forward pass in one call with the same kernels called one by one.

``.. forward_checks FILE SEED CASES`` checks that of one object.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch

from kvrelay.engine.attention.batch import pack
from kvrelay.engine.attention.native.backend import NativeBackend
from kvrelay.engine.attention.native.build import PLAIN
from kvrelay.engine.attention.native.forward import ForwardFunction, forward_function
from kvrelay.engine.attention.native.library import load_product, products_of
from kvrelay.engine.attention.native.products import Products, tiled
from kvrelay.engine.attention.pool import KVPool, PoolShape
from kvrelay.engine.core.updates import Work
from kvrelay.engine.model.compiled_decoder import CompiledDecoder, compiled_decoder
from kvrelay.engine.model.decoder_weights import DecoderLayer, DecoderWeights, HeadLayout, RmsNorm
from kvrelay.engine.model.native_decoder import NativeDecoder
from kvrelay.engine.model.packed_linear import Linear
from kvrelay.sampling import Sampling
from tests.engine.native.checks import same
from tests.engine.native.guarded import at_the_end

DTYPES = ("bfloat16", "float32")
BLOCKS, BLOCK = 24, 4
POSITIONS = 40


@dataclass(frozen=True, slots=True)
class Drawn:
    """A random model, and a pool with random K and V."""

    weights: DecoderWeights
    pool: KVPool
    vocab: int


class Source:
    """Random weights of one model, by the products of this machine or the plain ones."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
        self.name = rng.choice(DTYPES)
        self.dtype = getattr(torch, self.name)
        found = products_of(self.dtype)
        plain = Products(PLAIN, self.dtype, load_product(PLAIN), 0)
        self.products = found if isinstance(found, Products) and rng.random() < 0.7 else plain
        self.biases = rng.choice(("none", "qkv", "all"))

    def numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def linear(self, inputs: int, outputs: int, where: str = "") -> Linear:
        bias = self.numbers(outputs) if self.biases in ("all", where) else None
        return tiled(self.products, self.numbers(outputs, inputs) / inputs**0.5, bias)

    def norm(self, *shape: int) -> RmsNorm:
        return RmsNorm(self.numbers(*shape), self.rng.choice((1e-6, 1e-5, 0.1)))


def draw(rng: random.Random) -> Drawn:
    """Sizes that are no multiples of 16 among them, and no layer like another."""
    source = Source(rng)
    keys, width = rng.choice((1, 2, 3)), rng.choice((2, 16, 20, 48))
    heads = HeadLayout(keys * rng.choice((1, 2, 4)), keys, width, width**-0.5)
    size, wide, vocab = rng.choice((1, 8, 33, 160)), rng.choice((1, 32, 300)), rng.choice((1, 96))
    turning, attended = heads.queries + keys, heads.queries * width
    normed = rng.random() < 0.5
    layers = tuple(
        DecoderLayer(
            before_attention=source.norm(size),
            qkv=source.linear(size, (turning + keys) * width, "qkv"),
            heads_norm=source.norm(turning, width) if normed else None,
            out=source.linear(attended, size),
            before_mlp=source.norm(size),
            gate_up=source.linear(size, 2 * wide),
            down=source.linear(wide, size),
        )
        for _ in range(rng.choice((1, 2, 3)))
    )
    pool = KVPool(PoolShape(BLOCKS, len(layers), BLOCK, keys, width, source.name))
    pool.tensor.copy_(source.numbers(*pool.tensor.shape))
    angles = source.numbers(POSITIONS, 2, width // 2)
    head = source.linear(size, vocab)
    embedding = source.numbers(vocab, size)
    weights = DecoderWeights(heads, embedding, angles, layers, source.norm(size), head)
    return Drawn(weights, pool, vocab)


def works(rng: random.Random, vocab: int) -> list[Work]:
    """Decode entries and chunks over blocks of their own, sampled or not."""
    free = list(range(BLOCKS))
    rng.shuffle(free)
    found: list[Work] = []
    while free and len(found) < 5:
        start, count = rng.choice(((0, 1), (7, 1), (3, 1), (0, 9), (5, 6), (30, 1), (0, 40)))
        used = -(-(start + count) // BLOCK)
        blocks, free = free[:used], free[used:]
        if len(blocks) == used:
            tokens = [rng.randrange(vocab) for _ in range(start + count)]
            sampling = Sampling() if rng.random() < 0.6 else None
            found.append(Work(tokens, start, count, blocks, start + count, sampling))
    return found


@contextmanager
def guarded() -> Iterator[None]:
    """What ``torch.empty`` gives ends where a page without a right begins."""
    real = torch.empty

    def empty(
        shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
    ) -> torch.Tensor:
        sizes = (shape,) if isinstance(shape, int) else shape
        if device is not None or 0 in sizes:
            return real(sizes, dtype=dtype, device=device)
        return at_the_end(sizes, dtype)

    with patch.object(torch, "empty", empty):
        yield


def check_random(function: ForwardFunction, seed: int, cases: int) -> None:
    """The logits and all K and V are those of the same kernels called one by one, to the bit."""
    before = torch.get_num_threads()
    try:
        for case in range(cases):
            rng = random.Random(f"{seed} {case}")
            torch.set_num_threads(rng.choice((1, 2, 3)))
            check_step(function, draw(rng), rng, f"seed {seed}, case {case}")
    finally:
        torch.set_num_threads(before)


def check_step(function: ForwardFunction, drawn: Drawn, rng: random.Random, what: str) -> None:
    asked = works(rng, drawn.vocab)
    kept = drawn.pool.tensor.clone()
    made = []
    for one_call in (True, False):
        drawn.pool.tensor.copy_(kept)
        backend = NativeBackend(drawn.pool)
        compiled = compiled_decoder(drawn.weights, backend)
        assert isinstance(compiled, CompiledDecoder)
        single = NativeDecoder(drawn.weights, backend.rows)
        forward = replace(compiled, function=function) if one_call else single
        step = backend.step(pack(asked, BLOCK))
        inputs = step.inputs
        logits = forward.logits(inputs.tokens, inputs.positions, step, inputs.rows)
        assert logits.shape == (sum(work.sampling is not None for work in asked), drawn.vocab)
        made.append((logits, drawn.pool.tensor.clone()))
    for ours, theirs in zip(*made, strict=True):
        assert same(ours, theirs), what
    assert not same(made[0][1], kept), what


if __name__ == "__main__":
    with guarded():
        check_random(forward_function(ctypes.CDLL(sys.argv[1])), *map(int, sys.argv[2:]))
