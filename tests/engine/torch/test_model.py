"""Loading: what a model says of itself, every dtype, shards, and refusals with their reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvrelay.engine.attention.index import IndexBuilder
from kvrelay.engine.attention.native import backend
from kvrelay.engine.attention.native.arguments import KernelArguments, arguments_of_pool
from kvrelay.engine.model.loading import load_model
from kvrelay.engine.runner import Runner
from kvrelay.errors import Unservable
from tests.engine.torch.drive import Oracle, generate, prompts
from tests.models import EOS, KINDS, VOCAB, tiny_model

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
SLIDING = ["full_attention", "sliding_attention"]
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 6,
    "long_factor": [2.0] * 6,
}


def config_only(model_type: str, directory: Path, **settings: object) -> Path:
    """A directory whose weights are never read: the config is refused before."""
    AutoConfig.for_model(model_type, **{**COMMON, **settings}).save_pretrained(directory)
    (directory / "model.safetensors").touch()
    return directory


def with_weights(model_type: str, directory: Path, **settings: object) -> Path:
    """A small model as `transformers` starts it."""
    config = AutoConfig.for_model(model_type, **{**COMMON, **settings})
    build = AutoModelForCausalLM.from_config
    model = cast(PreTrainedModel, build(config))  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    return directory


def test_info(tmp_path: Path) -> None:
    path = tiny_model("qwen3", tmp_path / "small")
    info = load_model(path).info
    assert (info.name, info.architecture, info.dtype) == ("small", "Qwen3ForCausalLM", "float32")
    assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (2, 4, 2, 16)
    assert (info.vocab_size, info.max_model_len, info.eos_token_ids) == (VOCAB, 1024, (EOS,))
    assert info.num_parameters == sum(p.numel() for p in Oracle(path).model.parameters())
    assert info.logit_error < 1e-5
    assert load_model(path, max_model_len=77).info.max_model_len == 77


def test_revision_follows_the_weights(tmp_path: Path) -> None:
    first, again = (tiny_model("llama", tmp_path / name, seed=1) for name in ("a", "b"))
    other = tiny_model("llama", tmp_path / "c", seed=2)
    revisions = [load_model(path).info.revision for path in (first, again, other)]
    assert revisions[0] == revisions[1] != revisions[2]
    config = json.loads((again / "config.json").read_text())
    (again / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert load_model(again).info.revision != revisions[0]


def test_sharded(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path / "whole")
    oracle = Oracle(path)
    oracle.model.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    asked = prompts(1, [9, 30], VOCAB)
    runner = Runner(load_model(tmp_path / "shards"), num_blocks=40, block_size=4)
    got = generate(runner, asked, 6)
    assert [s.tokens[s.prompt_len :] for s in got] == [oracle.generate(p, 6) for p in asked]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral"])
def test_half_precision(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """As close to the float32 model as plain `transformers` is in the same dtype, or nearly."""
    path = tiny_model(kind, tmp_path / kind, dtype)
    loaded = load_model(path)
    assert loaded.info.dtype == str(dtype).removeprefix("torch.")
    runner = Runner(loaded, num_blocks=60, block_size=4)
    (stream,) = generate(runner, prompts(2, [40], VOCAB), 12, chunk=9, seed=2)
    full, half = Oracle(path), Oracle(path, dtype)
    want = full.logits(stream.tokens[:-1])[39:]
    noise = (half.logits(stream.tokens[:-1])[39:] - want).abs().max().item()
    for row, token in zip(want, stream.tokens[40:], strict=True):
        assert row.max() - row[token] <= 4 * noise


@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16"])
def test_dtype_is_what_was_asked(tmp_path: Path, asked: str) -> None:
    loaded = load_model(tiny_model("llama", tmp_path / "m"), dtype=asked)
    assert loaded.info.dtype == asked
    assert loaded.pool_shape(2, 4).dtype == asked


def test_window_as_long_as_the_longest_sequence(tmp_path: Path) -> None:
    path = tiny_model("mistral", tmp_path / "m", sliding_window=64)
    with pytest.raises(Unservable, match="window of 64, shorter than sequences of up to 1024"):
        load_model(path)
    loaded = load_model(path, max_model_len=64)
    (prompt,) = prompts(5, [50], VOCAB)
    (stream,) = generate(Runner(loaded, 20, 4), [prompt], 12, chunk=20)
    assert stream.tokens[50:] == Oracle(path).generate(prompt, 12)


def test_longrope_within_its_original_length(tmp_path: Path) -> None:
    length = {"original_max_position_embeddings": 64}
    settings = {"rope_parameters": LONGROPE | length, "pad_token_id": None, "eos_token_id": 1}
    settings |= length
    path = with_weights("phi3", tmp_path / "m", **settings)
    with pytest.raises(Unservable, match=r"'longrope'.*depend on the length; max_model_len 64"):
        load_model(path)
    assert load_model(path, max_model_len=64).info.max_model_len == 64


def test_dynamic_rope_within_its_length(tmp_path: Path) -> None:
    """Frequencies change beyond the model's own limit only, and no request gets there."""
    path = tiny_model("llama", tmp_path / "m", rope_parameters=DYNAMIC)
    (prompt,) = prompts(6, [50], VOCAB)
    (stream,) = generate(Runner(load_model(path), 20, 4), [prompt], 6, chunk=20)
    assert stream.tokens[50:] == Oracle(path).generate(prompt, 6)


def test_no_length_named(tmp_path: Path) -> None:
    AutoConfig.for_model("bloom").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(Unservable, match="no maximum length"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("t5", {}, "encoder-decoder"),
        ("bart", {}, "encoder-decoder|attention interface"),
        ("gemma3", {}, "multimodal"),
        ("llava", {}, "multimodal"),
        ("mistral", {"sliding_window": 16}, "window of 16, shorter than sequences of up to 512"),
        (
            "qwen2",
            {"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": 8},
            "window of 8",
        ),
        ("gemma2", {"sliding_window": 4096}, "soft-capped attention"),
        ("mamba", {}, "linear_attention"),
        ("qwen3_next", {"num_hidden_layers": 4}, "linear_attention"),
        ("gpt_oss", {"sliding_window": 4096, "head_dim": 16}, "attention sinks"),
        ("falcon", {"alibi": True}, "ALiBi"),
        ("mpt", {"max_seq_len": 512}, "attention interface"),
        ("biogpt", {"eos_token_id": 1}, "attention interface"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
    ],
)
def test_refused_by_config(
    tmp_path: Path, model_type: str, settings: dict[str, object], reason: str
) -> None:
    with pytest.raises(Unservable, match=reason):
        load_model(config_only(model_type, tmp_path, **settings))


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("bert", {}, "not causal"),
        ("nemotron", {}, "keyword arguments"),
        ("diffllama", {}, "4 of 2 layers call the attention interface"),
    ],
)
def test_refused_by_watching(
    tmp_path: Path, model_type: str, settings: dict[str, object], reason: str
) -> None:
    with pytest.raises(Unservable, match=reason):
        load_model(with_weights(model_type, tmp_path, **settings))


def test_refused_when_paging_changes_the_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last check needs no name for what is wrong: here, a mask that is off by one."""
    path = tiny_model("llama", tmp_path / "m")
    true = IndexBuilder._mask

    def one_too_few(self: IndexBuilder, lengths: NDArray[np.int64]) -> torch.Tensor:
        return true(self, lengths - 1)

    monkeypatch.setattr(IndexBuilder, "_mask", one_too_few)
    with pytest.raises(Unservable, match="paged attention changes its logits"):
        load_model(path, attention_backend="sdpa")


def test_refused_when_the_kernel_changes_the_logits(
    compiled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("llama", tmp_path / "m")

    def short_sighted(pool: torch.Tensor) -> KernelArguments:
        made = arguments_of_pool(pool)
        made.window = 3
        return made

    monkeypatch.setattr(backend, "arguments_of_pool", short_sighted)
    with pytest.raises(Unservable, match="paged attention changes its logits"):
        load_model(path, attention_backend="auto")


def test_weights_of_nan_are_refused(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path / "m")
    model = Oracle(path).model
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    model.save_pretrained(path)
    with pytest.raises(Unservable, match="changes its logits by nan"):
        load_model(path)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(Unservable, match="9 weights are missing from the files"):
        load_model(path)


def test_wrong_shapes_are_refused(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(Unservable, match="6 weights have other shapes"):
        load_model(path)


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path / "m")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(Unservable, match=r"weights cannot be read \(.*\): download them again"):
        load_model(path)


def test_directories_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(Unservable, match="no such folder"):
        load_model(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Unservable, match=r"no \*\.safetensors"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(Unservable, match="cannot be read as JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(Unservable, match="model_type is 'unheard-of', which"):
        load_model(tmp_path)


def test_options_are_checked(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path / "m")
    with pytest.raises(Unservable, match="dtype int8"):
        load_model(path, dtype="int8")
    with pytest.raises(Unservable, match="must be auto, cpu or cuda"):
        load_model(path, device="tpu")
    with pytest.raises(Unservable, match="exceeds the model's own limit of 1024"):
        load_model(path, max_model_len=1025)
    with pytest.raises(Unservable, match="at least 1"):
        load_model(path, max_model_len=0)
    if not torch.cuda.is_available():
        with pytest.raises(Unservable, match="no CUDA device"):
            load_model(path, device="cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_the_tiny_models_decide_clearly(tmp_path: Path, kind: str) -> None:
    """The gap between the two most likely tokens is far above float32's rounding."""
    oracle = Oracle(tiny_model(kind, tmp_path / kind))
    (prompt,) = prompts(9, [200], VOCAB)
    best = oracle.logits(prompt).topk(2, -1)
    smallest = (best.values[:, 0] - best.values[:, 1]).min().item()
    varied = len(set(best.indices[:, 0].tolist()))
    print(f"{kind}: smallest gap {smallest:.2g}, {varied} different tokens of 200")
    assert smallest > 1e-4
    assert varied > 40
