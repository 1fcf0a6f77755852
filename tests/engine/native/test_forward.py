"""A forward pass in one call: the bits of many calls, which models have it, and what it refuses."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvrelay.engine.attention.batch import pack
from kvrelay.engine.attention.native.arguments import KernelArguments
from kvrelay.engine.attention.native.backend import NativeBackend
from kvrelay.engine.attention.native.build import PLAIN
from kvrelay.engine.attention.native.forward import forward_function
from kvrelay.engine.attention.native.library import (
    FORCED_PRODUCTS,
    ONEDNN,
    open_object,
    products_of,
)
from kvrelay.engine.attention.native.products import Products
from kvrelay.engine.attention.pool import KVPool
from kvrelay.engine.core.updates import Work
from kvrelay.engine.model.compiled_decoder import CompiledDecoder, compiled_decoder
from kvrelay.engine.model.decoder_weights import DecoderWeights, RmsNorm
from kvrelay.engine.model.loading import load_model
from kvrelay.engine.model.native_decoder import NativeDecoder
from kvrelay.engine.runner import Runner
from kvrelay.process.shared_cores import WORKERS, CoresView
from kvrelay.sampling import Sampling
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
    with forward_checks.guarded():
        forward_checks.check_random(forward_function(open_object(PLAIN)), seed, 60)


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
    strange = [Work([token], 0, 1, [0], 1, None) for token in (drawn.vocab, -1)]
    for work in (late, *strange):
        with pytest.raises(IndexError, match=f"below {drawn.vocab}, and positions below 40"):
            run(forward, drawn, work)
    with pytest.raises(MemoryError, match="1 rows"):
        run(replace(forward, function=lambda *_: 1), drawn, Work([0], 0, 1, [0], 1, None))


@pytest.mark.parametrize(
    ("share", "most", "cores", "threads"),
    [(1, 8, 2, [1, 2]), (3, 8, 4, [3, 4]), (1, 3, 8, [3, 3]), (1, 8, 8, [4, 8])],
)
def test_every_layer_asks_for_its_threads(
    compiled: None, share: int, most: int, cores: int, threads: list[int]
) -> None:
    """Another worker rests during the first layer: the second one may have its cores, too."""
    drawn = draw(random.Random(0))
    backend, forward = NativeBackend(drawn.pool), decoder(drawn)
    computing = (ctypes.c_uint8 * WORKERS)(1, 1)
    backend.shared = CoresView(ctypes.addressof(computing), WORKERS, share, most, cores)
    found: list[int] = []

    def attend(arguments: KernelArguments) -> int:
        found.append(arguments.threads)
        computing[1] = 0
        return backend.kernel.function(arguments)

    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(KernelArguments))
    called = kind(lambda pointer: attend(pointer.contents))
    forward.decoder.kernels.attention = ctypes.cast(called, ctypes.c_void_p).value
    step = backend.step(pack([Work([0], 0, 1, [0], 1, Sampling())], BLOCK))
    forward.logits(step.inputs.tokens, step.inputs.positions, step, step.inputs.rows)
    assert found == threads


@pytest.mark.parametrize("rows", [[3], [-1], [2, 0], [1, 1]])
def test_rows_to_keep_ascend(drawn: Drawn, rows: list[int]) -> None:
    step = NativeBackend(drawn.pool).step(pack([Work([0] * 3, 0, 3, [0], 3, None)], BLOCK))
    inputs = step.inputs
    with pytest.raises(IndexError, match="must ascend and be below 3"):
        decoder(drawn).logits(inputs.tokens, inputs.positions, step, torch.tensor(rows))


def test_numbers_of_another_step(drawn: Drawn) -> None:
    step = NativeBackend(drawn.pool).step(pack([Work([0] * 4, 0, 4, [0], 4, None)], BLOCK))
    tokens, positions, rows = step.inputs.tokens, step.inputs.positions, step.inputs.rows
    for wrong in (
        (tokens[:, :3], positions, rows),
        (tokens, positions[:, :3], rows),
        (tokens.int(), positions, rows),
        (tokens, positions.int(), rows),
        (tokens, positions, rows.int()),
        (tokens, torch.zeros(1, 8, dtype=torch.int64)[:, ::2], rows),
    ):
        with pytest.raises(ValueError, match=r"step of 4 rows|contiguous and int64"):
            decoder(drawn).logits(*wrong[:2], step, wrong[2])


@pytest.mark.parametrize(
    "other",
    [
        {"num_layers": 9},
        {"num_kv_heads": 9},
        {"head_dim": 12},
        {"dtype": "float16"},
    ],
)
def test_a_step_over_another_pool_is_refused(drawn: Drawn, other: dict[str, int | str]) -> None:
    pool = KVPool(replace(drawn.pool.shape, **other))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="another pool"):
        run(decoder(drawn), replace(drawn, pool=pool), Work([0], 0, 1, [0], 1, None))


def _first(weights: DecoderWeights, **changed: object) -> DecoderWeights:
    """Its first layer changed."""
    first, *others = weights.layers
    return replace(weights, layers=(replace(first, **changed), *others))  # type: ignore[arg-type]


WRONG: dict[str, Callable[[DecoderWeights], DecoderWeights]] = {
    "a norm": lambda w: replace(w, norm=RmsNorm(w.norm.weight.double(), 0.0)),
    "angles": lambda w: replace(w, angles=w.angles.double()),
    "a layer that is not packed": lambda w: _first(w, out=torch.relu),
    "a narrower layer": lambda w: _first(w, down=w.layers[0].qkv),
    "an odd joint product": lambda w: _first(w, gate_up=w.layers[0].down),
    "no layers": lambda w: replace(w, layers=()),
    "heads": lambda w: replace(w, heads=replace(w.heads, queries=w.heads.queries + 1)),
    "a scale": lambda w: replace(w, heads=replace(w.heads, scaling=0.0)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_weights_that_do_not_fit_are_refused(drawn: Drawn, wrong: str) -> None:
    """Compiled code would read other memory."""
    with pytest.raises(ValueError, match=r"weights are|not packed|a weight of|layers of"):
        compiled_decoder(WRONG[wrong](drawn.weights), NativeBackend(drawn.pool))


def test_engines_in_threads_of_one_process(compiled: None) -> None:
    """Nothing of a forward pass is shared."""
    function = forward_function(open_object(PLAIN))
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda seed: forward_checks.check_random(function, seed, 10), range(3)))
