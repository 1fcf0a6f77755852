"""The models written out and the packed linear layers, against what they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvrelay.engine.attention.native.library import FORCED_PRODUCTS, ONEDNN
from kvrelay.engine.model.decoder import Decoder
from kvrelay.engine.model.forward import TransformersModel
from kvrelay.engine.model.loading import load_model
from kvrelay.engine.model.packed_linear import PackedLinear, linear, pack_linears, stacked
from kvrelay.engine.runner import Runner
from tests.engine.torch.drive import Oracle, generate, prompts
from tests.models import KINDS, VOCAB, tiny_model

WRITTEN = ["llama", "llama-mha", "llama-tied", "qwen2", "qwen3", "mistral"]


@pytest.mark.parametrize("kind", KINDS)
def test_which_models_are_written_out(tmp_path: Path, kind: str) -> None:
    forward = load_model(tiny_model(kind, tmp_path / kind)).forward
    assert type(forward) is (Decoder if kind in WRITTEN else TransformersModel)


def test_an_unusual_llama_runs_by_its_own_forward(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path / "m", hidden_act="gelu")
    loaded, asked = load_model(path), prompts(1, [30, 5], VOCAB)
    assert type(loaded.forward) is TransformersModel
    got = generate(Runner(loaded, 40, 4), asked, 6, chunk=8)
    own = Oracle(path)
    assert [s.tokens[s.prompt_len :] for s in got] == [own.generate(p, 6) for p in asked]


@pytest.mark.parametrize("kind", WRITTEN)
def test_biases_everywhere(tmp_path: Path, kind: str) -> None:
    path = tiny_model(kind, tmp_path / kind, attention_bias=True, mlp_bias=True)
    loaded, asked = load_model(path), prompts(2, [30, 5], VOCAB)
    got = generate(Runner(loaded, 40, 4), asked, 6, chunk=8)
    own = Oracle(path)
    assert [s.tokens[s.prompt_len :] for s in got] == [own.generate(p, 6) for p in asked]


@pytest.mark.parametrize("rope", ["llama3", "linear", "yarn"])
def test_rope_types(tmp_path: Path, rope: str) -> None:
    settings: dict[str, object] = {"rope_type": rope, "rope_theta": 10000.0, "factor": 4.0}
    settings["original_max_position_embeddings"] = 256
    if rope == "llama3":
        settings |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    path = tiny_model("llama", tmp_path / rope, rope_parameters=settings)
    loaded, asked = load_model(path), prompts(3, [70, 5], VOCAB)
    got = generate(Runner(loaded, 60, 4), asked, 6, chunk=17)
    own = Oracle(path)
    assert [s.tokens[s.prompt_len :] for s in got] == [own.generate(p, 6) for p in asked]


@pytest.mark.parametrize("kind", WRITTEN)
def test_half_precision_is_as_close_as_the_models_own(tmp_path: Path, kind: str) -> None:
    """Logits after a whole prompt, against `transformers` in bfloat16: nearly always to the bit."""
    path = tiny_model(kind, tmp_path / kind, torch.bfloat16)
    runner = Runner(load_model(path), 60, 4)
    asked = prompts(4, [3, 29, 64], VOCAB)
    own = Oracle(path, torch.bfloat16)
    for stream in generate(runner, asked, 1):
        logits = own.logits(stream.tokens[:-1])[-1]
        assert logits.max() - logits[stream.tokens[-1]] <= 0.02 * logits.abs().max()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 2, 17])
def test_packed_linear(rows: int, dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    layer = torch.nn.Linear(40, 24, bias).to(dtype)
    other = torch.nn.Linear(40, 8, bias).to(dtype)
    given = torch.randn(rows, 40, generator=generator).to(dtype)
    with torch.inference_mode():
        want = torch.cat((layer(given), other(given)), -1)
        made = [linear(layer)(given), stacked((layer, other))(given)]
        model = torch.nn.Sequential(layer)
        pack_linears(model)
        made.append(model(given[None])[0])
        for got in made:
            torch.testing.assert_close(got, want[..., : got.shape[-1]], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "products"),
    [
        (torch.float32, ""),
        (torch.float32, ONEDNN),
        (torch.bfloat16, ""),
        (torch.bfloat16, ONEDNN),
    ],
    ids=["float32", "float32 of oneDNN", "bfloat16", "bfloat16 of oneDNN"],
)
@pytest.mark.parametrize("columns", [192, 300])
@pytest.mark.parametrize("size", [48, 1024, 1025, 2048, 3072, 8192])
def test_a_row_of_a_product_does_not_depend_on_those_beside_it(
    monkeypatch: pytest.MonkeyPatch, size: int, columns: int, dtype: torch.dtype, products: str
) -> None:
    """A lone row least of all: a stream that decodes alone is one."""
    half = dtype is torch.bfloat16
    if products and half and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this processor")
    monkeypatch.setenv(FORCED_PRODUCTS, products)
    generator = torch.Generator().manual_seed(size)
    layer = torch.nn.Linear(size, columns, False).to(dtype)
    product, before = linear(layer), torch.get_num_threads()
    given = torch.randn(24, size, generator=generator).to(dtype)
    try:
        with torch.inference_mode():
            torch.set_num_threads(1)
            whole = product(given)
            for threads in (1, 2, 3, 8):
                torch.set_num_threads(threads)
                for many in (1, 2, 3, 7):
                    for first in range(0, 24 - many, 3):
                        got = product(given[first : first + many])
                        assert torch.equal(got, whole[first : first + many]), (threads, many)
    finally:
        torch.set_num_threads(before)


def test_pack_linears_replaces_plain_ones_alone() -> None:
    class Own(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(Own(4, 4)))
    half = torch.nn.Sequential(torch.nn.Linear(4, 4).to(torch.float16))
    assert (pack_linears(model), pack_linears(half)) == (1, 0)
    assert type(model[0]) is PackedLinear
