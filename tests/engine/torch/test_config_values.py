"""A config.json with broken values is refused in a sentence: the field, its value, the way out."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvrelay.engine.model.config_values import WAY_OUT, value_reasons
from kvrelay.engine.model.loading import check_model, load_model
from kvrelay.errors import Unservable
from tests.models import EOS, VOCAB, tiny_model

SMALL: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}


def rope(base: dict[str, object] = YARN, **more: object) -> dict[str, object]:
    return {"rope_parameters": {**base, **more}}


def folder(directory: Path, text: str | bytes) -> Path:
    """The weights are never read: the config is refused before."""
    (directory / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    (directory / "model.safetensors").touch()
    return directory


def refusal(directory: Path) -> str:
    with pytest.raises(Unservable) as caught:
        check_model(directory)
    text = str(caught.value)
    assert "\n" not in text
    assert "StrictDataclass" not in text
    return text.removeprefix(f"{directory}: ")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        *(
            ({name: value}, f"{name} is {shown}, but must be a whole number from 1 to ")
            for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
            for value, shown in [(-2, "-2"), (0, "0"), (10**15, "1000000000000000"), (None, "null")]
        ),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5, but must be a whole number"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads is '2', but must be a whole number"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0, but must be a whole number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide"),
        ({"head_dim": 10**12}, "head_dim is 1000000000000, but must be"),
        ({"head_dim": True}, "head_dim is true, but must be a whole number"),
        ({"head_dim": 7}, "config.json contradicts itself: RoPE requires an even rotary dimension"),
        ({"hidden_size": [1]}, "hidden_size is [1], but must be a whole number"),
        ({"layer_types": [{}, []]}, "layer_types names {}, which `transformers` does not know"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0, but must be"),
        ({"max_position_embeddings": math.nan}, "max_position_embeddings is NaN, but must be"),
        ({"max_position_embeddings": 10**15}, "max_position_embeddings is 1000000000000000, but"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is NaN, but must be a small number"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps is Infinity, but must be a small number"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x', but must be a small number"),
        ({"rms_norm_eps": 1}, "rms_norm_eps is 1, but must be a small number"),
        ({"rope_parameters": "yarn"}, "rope_parameters is 'yarn', but must be an object"),
        (rope(rope_theta=math.inf), "rope_parameters.rope_theta is Infinity, but must be a pos"),
        (rope(rope_theta=None), "rope_parameters.rope_theta is null, but must be a positive"),
        (rope(rope_type="spiral"), "rope_parameters.rope_type is 'spiral', but must be one of"),
        (rope(factor=-1), "rope_parameters.factor is -1, but must be a number from 1 on"),
        (rope(factor=math.nan), "rope_parameters.factor is NaN, but must be a number from 1"),
        (rope(attention_factor=math.nan), "rope_parameters.attention_factor is NaN, but must"),
        (rope(beta_fast=-1), "rope_parameters.beta_fast is -1, but must be a positive number"),
        (rope(original_max_position_embeddings="a"), "max_position_embeddings is 'a', but must"),
        (rope(partial_rotary_factor=5), "partial_rotary_factor is 5, but must be above 0 and"),
        (rope(LLAMA3), "Missing required keys in `rope_parameters`"),
        (rope(LLAMA3, low_freq_factor=4.0, high_freq_factor=1.0), "low_freq_factor is 4, not bel"),
        (rope(LONG, short_factor=[1.0], long_factor=[1.0] * 4), "short_factor has 1 numbers, but"),
        (rope({}, full_attention={**YARN, "factor": "x"}), "full_attention.factor is 'x', but"),
        (rope({}, full_attention=3), "rope_parameters.full_attention is 3, but must be an object"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "rope_scaling.factor is -2, but"),
        ({"hidden_act": "swoosh"}, "hidden_act is 'swoosh', but must be the name of an activat"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', but must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', but must be a token id, a list of th"),
        ({"eos_token_id": [2, 0.5]}, "eos_token_id is [2, 0.5], but must be a token id, a list"),
        ({"eos_token_id": 64}, "eos_token_id is 64, but must be a token id from 0 to 63, or null"),
        ({"eos_token_id": -1}, "eos_token_id is -1, but must be a token id from 0 to 63, or null"),
        ({"eos_token_id": [64, 999]}, "eos_token_id is [64, 999], but must be a token id from 0"),
        ({"initializer_range": math.nan}, "initializer_range is wrong: Value must be"),
        ({"id2label": 7}, "`transformers` cannot build a model from id2label 7 in config.json"),
        ({"dtype": "float13"}, "dtype is 'float13', but must be a number format"),
        ({"model_type": 7}, "model_type is 7, but must be the name of an architecture"),
        ({"model_type": "foo"}, "model_type is 'foo', which this version of `transformers`"),
        ({"layer_types": ["full_attention"]}, "but must be a list of 2 names, one for each layer"),
        ({"layer_types": ["circular"] * 2}, "layer_types names 'circular', which `transformers`"),
        ({"sliding_window": 0}, "sliding_window is 0, but must be null or a whole number from 1"),
        ({"quantization_config": "gptq"}, "quantization_config is 'gptq', but must be an object"),
    ],
)
def test_a_broken_value_is_named(tmp_path: Path, changed: dict[str, object], said: str) -> None:
    """Some used to be accepted and computed NaN; 10**15 layers were built without an end."""
    text = refusal(folder(tmp_path, json.dumps({**SMALL, **changed})))
    assert said in text
    assert text.endswith(f": {WAY_OUT}")


def test_the_end_in_generation_config_counts(tmp_path: Path) -> None:
    """It comes before that of config.json, in `transformers` and vLLM too."""
    folder(tmp_path, json.dumps({**SMALL, "eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [70, 71]}')
    (text,) = value_reasons(tmp_path)
    assert text.startswith("eos_token_id in generation_config.json is [70, 71], but must be a tok")
    folder(tmp_path, json.dumps({**SMALL, "eos_token_id": 70}))
    for ending in ("3", "[3, 70]", "[3]"):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {ending}}}')
        assert value_reasons(tmp_path) == ()
    for no_ending in ("{}", '{"eos_token_id": null}', '{"eos_token_id": []}'):
        (tmp_path / "generation_config.json").write_text(no_ending)
        assert value_reasons(tmp_path)[0].startswith("eos_token_id is 70, but must be")
    (tmp_path / "generation_config.json").write_text("{")
    assert value_reasons(tmp_path)[0].startswith("generation_config.json cannot be read as JSON")


def test_endings_that_no_token_has_are_left_out(tmp_path: Path) -> None:
    """`min_tokens` masks the logits of every ending: one beyond them would end the worker."""
    model = tiny_model("llama", tmp_path, eos_token_id=[EOS, VOCAB, 10**6])
    (tmp_path / "generation_config.json").unlink()
    assert load_model(model).info.eos_token_ids == (EOS,)


@pytest.mark.parametrize(
    ("kind", "architectures", "fits"),
    [
        ("llama", ["LlamaForCausalLM"], True),
        ("llama", ["YiForCausalLM"], True),  # unknown to transformers: may be the same model
        ("llama", [], True),
        ("llama", None, True),
        ("llama", ["LlamaForSequenceClassification"], False),
        ("llama", ["MistralForCausalLM"], False),
        ("llama", ["LlamaModel"], False),
        ("gpt2", ["GPT2LMHeadModel"], True),
        ("gpt2", ["GPT2DoubleHeadsModel"], False),
    ],
)
def test_architectures_that_model_type_does_not_mean(
    tmp_path: Path, kind: str, architectures: list[str] | None, fits: bool
) -> None:
    """With tied weights such a checkpoint has all weights of a causal language model."""
    small = {name: value for name, value in SMALL.items() if name != "model_type"}
    AutoConfig.for_model(kind, **small).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings |= {"architectures": architectures, "eos_token_id": 2}
    folder(tmp_path, json.dumps(settings))
    if fits:
        check_model(tmp_path)
        return
    text = refusal(tmp_path)
    assert f"a checkpoint of {(architectures or [''])[0]} (architectures in config.json)" in text
    assert f"where model type {kind!r} means" in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "Expecting value: line 1 column 1"),
        (json.dumps(SMALL)[:-1] + ",}", "Expecting property name"),
        (b'{"model_type": "\xff"}', "invalid start byte"),
        ("[" * 100_000, "maximum recursion depth"),
        ('{"hidden_size": 1' + "0" * 5000 + "}", "integer string conversion"),
    ],
)
def test_a_config_that_is_no_json(tmp_path: Path, content: str | bytes, said: str) -> None:
    text = refusal(folder(tmp_path, content))
    assert text.startswith("config.json cannot be read as JSON (")
    assert said in text
    assert text.endswith(": download it again")


@pytest.mark.parametrize(("content", "shown"), [("[1]", "[1]"), ("null", "null"), ("7", "7")])
def test_a_config_without_settings(tmp_path: Path, content: str, shown: str) -> None:
    wanted = f"config.json holds {shown} and no settings: {WAY_OUT}"
    assert refusal(folder(tmp_path, content)) == wanted


def test_all_broken_values_at_once(tmp_path: Path) -> None:
    changed = {"vocab_size": 0, "hidden_act": "swoosh", **rope(factor=0)}
    text = refusal(folder(tmp_path, json.dumps({**SMALL, **changed})))
    assert text.startswith("3 reasons: (1) vocab_size is 0")
    assert text.count(WAY_OUT) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("intermediate_size", 96), ("vocab_size", 32), ("hidden_size", 64), ("head_dim", 16)],
)
def test_weights_of_other_shapes_are_named(tmp_path: Path, name: str, value: int) -> None:
    """It used to say "you set `ignore_mismatched_sizes` to `False`"."""
    settings = {key: setting for key, setting in SMALL.items() if key != "model_type"}
    config = AutoConfig.for_model("llama", **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    load_model(tmp_path)
    folder_config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**folder_config, name: value}))
    with pytest.raises(Unservable, match=r"\d+ weights have other shapes.*by config.json: take"):
        load_model(tmp_path)


def test_the_own_settings_of_every_architecture_are_accepted(tmp_path: Path) -> None:
    wrong = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
        except Exception:  # noqa: BLE001 it has no settings of its own, or misses a library
            continue
        if reasons := value_reasons(tmp_path):
            wrong[kind] = reasons
    strange = [kind for kind, (reason, *_) in wrong.items() if not reason.startswith("eos_token")]
    assert strange == []
    assert wrong.keys() == {"arcee", "starcoder2"}, "of whose defaults `transformers` warns too"
