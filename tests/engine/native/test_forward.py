"""A forward pass in one call: the bits of many calls, which models have it, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvrelay.engine.attention.batch import pack
from kvrelay.engine.attention.native.backend import NativeBackend
from kvrelay.engine.attention.native.build import PLAIN
from kvrelay.engine.attention.native.forward import forward_functions
from kvrelay.engine.attention.native.library import (
    FORCED_PRODUCTS,
    ONEDNN,
    open_object,
    products_of,
)
from kvrelay.engine.attention.native.products import Products
from kvrelay.engine.core.updates import Work
from kvrelay.engine.model.compiled_decoder import CompiledDecoder, compiled_decoder
from kvrelay.engine.model.decoder_weights import DecoderWeights, RmsNorm
from kvrelay.engine.model.loading import load_model
from kvrelay.engine.model.native_decoder import NativeDecoder
from kvrelay.engine.runner import Runner
from tests.engine.native import forward_checks
from tests.engine.native.forward_checks import BLOCK, POSITIONS, Drawn, draw
from tests.models import tiny_model


@pytest.fixture
def drawn(compiled: None) -> Drawn:
    return draw(random.Random(3))


def decoder(drawn: Drawn) -> CompiledDecoder:
    found = compiled_decoder(drawn.weights, NativeBackend(drawn.pool))
    assert found is not None
    return found


def run(forward: CompiledDecoder, drawn: Drawn, work: Work) -> torch.Tensor:
    step = NativeBackend(drawn.pool).step(pack([work], BLOCK))
    inputs = step.inputs
    return forward.logits(inputs.tokens, inputs.positions, step, inputs.rows)


def test_random_models_and_steps(compiled: None) -> None:
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    forward_checks.check_random(forward_functions(open_object(PLAIN)), seed, 60)


@pytest.mark.parametrize("products", ["", ONEDNN])
def test_which_models_have_it(
    compiled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, products: str
) -> None:
    """Those whose products are ours; oneDNN's are called one by one."""
    monkeypatch.setenv(FORCED_PRODUCTS, products)
    ours = isinstance(products_of(torch.bfloat16), Products)
    loaded = load_model(tiny_model("qwen3", tmp_path / "m", torch.bfloat16))
    assert type(Runner(loaded, 8, 4).forward) is (CompiledDecoder if ours else NativeDecoder)
    assert type(Runner(loaded, 8, 4, "sdpa").forward) is type(loaded.forward)


def test_what_a_step_may_not_be(drawn: Drawn) -> None:
    forward = decoder(drawn)
    late = Work([0] * (POSITIONS + 1), POSITIONS, 1, list(range(11)), 1, None)
    with pytest.raises(IndexError, match=f"position {POSITIONS} of {POSITIONS}"):
        run(forward, drawn, late)
    for token in (drawn.vocab, -1):
        with pytest.raises(IndexError, match=f"not one of {drawn.vocab}"):
            run(forward, drawn, Work([token], 0, 1, [0], 1, None))
    step = NativeBackend(drawn.pool).step(pack([Work([0, 0], 0, 2, [0], 2, None)], BLOCK))
    inputs = step.inputs
    for positions, rows in ((inputs.positions[:, :1], 0), (inputs.positions, 3)):
        with pytest.raises(ValueError, match="2 rows"):
            forward.logits(inputs.tokens, positions, step, torch.zeros(rows, dtype=torch.int64))
    with pytest.raises(MemoryError, match="1 rows"):
        run(
            replace(forward, functions=replace(forward.functions, forward=lambda *_: 1)),
            drawn,
            Work([0], 0, 1, [0], 1, None),
        )


def _other_norm(weights: DecoderWeights) -> DecoderWeights:
    return replace(weights, norm=RmsNorm(weights.norm.weight.float(), 0.0))


def _other_angles(weights: DecoderWeights) -> DecoderWeights:
    return replace(weights, angles=weights.angles.float())


def _not_packed(weights: DecoderWeights) -> DecoderWeights:
    first, *others = weights.layers
    return replace(weights, layers=(replace(first, out=torch.relu), *others))


def _narrower(weights: DecoderWeights) -> DecoderWeights:
    first, *others = weights.layers
    return replace(weights, layers=(replace(first, down=first.qkv), *others))


@pytest.mark.parametrize("wrong", [_other_norm, _other_angles, _not_packed, _narrower])
def test_weights_that_do_not_fit_are_refused(
    drawn: Drawn, wrong: Callable[[DecoderWeights], DecoderWeights]
) -> None:
    """Compiled code would read other memory."""
    with pytest.raises(ValueError, match=r"weights are|not packed|weight of"):
        compiled_decoder(wrong(drawn.weights), NativeBackend(drawn.pool))
