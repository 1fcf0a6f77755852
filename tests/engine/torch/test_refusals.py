"""A checkpoint that cannot be served: every reason at once, in words, with the way out if any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvrelay.engine.model.loading import check_model, load_model
from kvrelay.errors import Unservable

SMALL = {
    "vocab_size": 288,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
HYBRID = {**SMALL, "num_hidden_layers": 3}
WINDOW = {"sliding_window": 128, "head_dim": 16}
NARROW = "window of 128, shorter than sequences of up to 512"
ADVICE = "would do"
OTHER = "; no option changes that: choose another model"


def folder(model_type: str, directory: Path, settings: dict[str, object]) -> Path:
    """A config, and weights that are never read: the model is refused before."""
    AutoConfig.for_model(model_type, **settings).save_pretrained(directory)
    (directory / "model.safetensors").touch()
    return directory


def refusal(directory: Path, dtype: str = "auto", max_model_len: int | None = None) -> str:
    with pytest.raises(Unservable) as caught:
        load_model(directory, dtype, max_model_len=max_model_len)
    with pytest.raises(Unservable) as checked:
        check_model(directory, dtype, max_model_len=max_model_len)
    text = str(caught.value)
    assert str(checked.value) == text
    assert text.startswith(f"{directory}: ")
    assert "\n" not in text
    return text.removeprefix(f"{directory}: ")


@pytest.mark.parametrize(
    ("model_type", "settings", "reasons"),
    [
        ("gemma2", {**SMALL, **WINDOW}, (NARROW, "soft-capped attention logits")),
        ("vaultgemma", {**SMALL, **WINDOW}, (NARROW, "soft-capped attention logits")),
        ("gpt_oss", {**SMALL, **WINDOW}, (NARROW, "attention sinks")),
        ("gemma4_text", {**SMALL, **WINDOW}, (NARROW, "the number or width of their heads")),
        ("deepseek_v3", SMALL, ("multi-head latent attention (MLA)",)),
        ("minicpm3", SMALL, ("multi-head latent attention (MLA)",)),
        ("mamba", SMALL, ("a recurrent model (every layer is of type 'linear_attention')",)),
        (
            "recurrent_gemma",
            HYBRID,
            ("'linear_attention'", "1 of 3 layers call the attention interface"),
        ),
        ("falcon", {**SMALL, "alibi": True}, ("ALiBi", "attention interface")),
    ],
)
def test_no_length_is_advised_that_would_not_do(
    tmp_path: Path, model_type: str, settings: dict[str, object], reasons: tuple[str, ...]
) -> None:
    """Every reason is told, also those that the modules show, without reading the weights."""
    text = refusal(folder(model_type, tmp_path, settings))
    assert all(reason in text for reason in reasons), text
    assert ADVICE not in text
    assert text.endswith(OTHER)
    if len(reasons) > 1:
        assert text.startswith(f"{len(reasons)} reasons: (1) ")


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [("mistral", WINDOW), ("gemma3_text", WINDOW), ("cohere2", {"sliding_window": 128})],
)
def test_a_length_that_is_advised_does(
    tmp_path: Path, model_type: str, settings: dict[str, object]
) -> None:
    small = {**SMALL, "pad_token_id": None, "eos_token_id": 1, "bos_token_id": 2}
    config = AutoConfig.for_model(model_type, **{**small, **settings})
    model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path)
    text = refusal(tmp_path)
    assert NARROW in text
    assert text.endswith("; max_model_len 128 would do")
    assert load_model(tmp_path, max_model_len=128).info.max_model_len == 128


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("t5", "an encoder-decoder model"),
        ("whisper", "an encoder-decoder model"),
        ("qwen2_vl", "a multimodal model"),
        ("llava", "a multimodal model"),
        ("gemma4", "a multimodal model"),
        ("vit", "no causal language model"),
    ],
)
def test_the_kind_of_a_model_is_told_before_its_length(
    tmp_path: Path, model_type: str, reason: str
) -> None:
    text = refusal(folder(model_type, tmp_path, {}))
    assert text.startswith(reason) or reason in text
    assert "maximum length" not in text
    assert text.endswith(OTHER)


def test_all_reasons_at_once(tmp_path: Path) -> None:
    """Of the folder, the options, the format and the attention."""
    settings = {**SMALL, **WINDOW, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    path = folder("gemma2", tmp_path, settings)
    (path / "adapter_config.json").write_text("{}")
    text = refusal(path, dtype="int8", max_model_len=1000)
    assert text.startswith("6 reasons: (1) ")
    for reason in (
        "a LoRA adapter (adapter_config.json) lies beside the model",
        "dtype int8",
        "quantised weights",
        "max_model_len 1000 exceeds the model's own limit of 512",
        NARROW,
        "soft-capped",
    ):
        assert reason in text
    assert ADVICE not in text


def test_a_folder_that_cannot_be_read_is_told_with_what_its_names_show(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "pytorch_model.bin").touch()
    assert "pickles, which are never loaded" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "code of its own"),
        (
            {"model_type": "llama", "vocab_size": "x"},
            "vocab_size is 'x', but must be a whole number",
        ),
        ({"model_type": "unheard-of"}, "model_type is 'unheard-of', which this version"),
        ({"model_type": "llama", "compression_config": {}}, "quantised weights"),
    ],
)
def test_a_config_that_cannot_be_used(
    tmp_path: Path, config: dict[str, object], reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    assert reason in refusal(tmp_path)


def test_a_lora_adapter_is_not_ignored(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **SMALL)
    model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path)
    load_model(tmp_path)
    check_model(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    assert "merge_and_unload" in refusal(tmp_path)
