"""Whether the values in a config.json can be those of a model.

`transformers` accepts some of them and computes NaN, builds modules for minutes, or fails with a
name of its own insides. Each reason here names the field, its value and what it must be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvrelay.engine.model.pretrained import FOREIGN

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

WAY_OUT = "take config.json from the original checkpoint"
MAX_BYTES = 16 << 20
MOST_SHOWN = 60  # characters of a value
LONGEST = 300  # characters of another library's error
MOST_POSITIONS = (1 << 31) - 1
LARGEST = 1e30  # of a factor or base; more overflows float32

_POSITIVE = "a positive number"
_COUNTS = {  # the name of `transformers` and older ones, with a bound that no model comes near
    **dict.fromkeys(("vocab_size",), 1 << 24),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 1 << 20),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 1 << 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 1 << 10),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads"), 1 << 16),
    **dict.fromkeys(("head_dim",), 1 << 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), MOST_POSITIONS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 1 << 16),
}
_NO_NULL = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_WINDOWS = ("sliding_window", "attention_chunk_size")
_ROPES = ("rope_parameters", "rope_scaling")
_ROPE_TYPES = frozenset(ROPE_INIT_FUNCTIONS) | {"default", "mrope", "su"}
_ROPE_FACTORS = (
    "rope_theta",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
)
_ROPE_LISTS = ("short_factor", "long_factor")
_FIELD = re.compile(r"Validation error for field '(\w+)':\s+\w+: (.*)", re.S)
_VALUE = re.compile(r"(?:value:|with value) (.+?)(?:\)| doesn't match)", re.S)
_EXPECTED = re.compile(r"expected (\w+), got")
_CLASS = re.compile(r"Class validation error for validator '\w+':\s+\w+: (.*)", re.S)
_KINDS = {
    "int": "a whole number",
    "float": "a number with a point, such as 0.0",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "dict": "an object",
    "NoneType": "null",
}


def value_reasons(directory: Path) -> tuple[str, ...]:
    """Everything that is wrong with the values of ``config.json``; empty if there is no file."""
    path = directory / "config.json"
    if not path.is_file():
        return ()
    try:
        raw = _read(path)
    except (ValueError, RecursionError) as error:
        return (f"config.json cannot be read as JSON ({_line(str(error))}): download it again",)
    if not isinstance(raw, dict):
        return (f"config.json holds {_shown(raw)} and no settings: {WAY_OUT}",)
    wrong = [*_wrong(raw), *_endings(directory, raw)]
    return (*wrong[:-1], f"{wrong[-1]}: {WAY_OUT}") if wrong else ()


def foreign_reason(error: Exception, directory: Path | None = None) -> str:
    """What `transformers` says against a config, in our words as far as its form is known.

    Looks for the field at fault in the ``config.json`` of ``directory``.
    """
    text = str(error)
    if found := _FIELD.search(text):
        return f"{_field_reason(found[1], found[2])}: {WAY_OUT}"
    if found := _CLASS.search(text):
        return f"config.json contradicts itself: {_line(found[1])}: {WAY_OUT}"
    where = "config.json" if directory is None else _culprit(directory, text)
    said = f"{type(error).__name__}: {_line(text)}"
    return f"`transformers` cannot build a model from {where} ({said}): {WAY_OUT}"


def _field_reason(name: str, said: str) -> str:
    kinds = [_KINDS.get(kind, kind) for kind in dict.fromkeys(_EXPECTED.findall(said))]
    value = _VALUE.search(said)
    if not kinds or value is None:
        return f"{name} is wrong: {_line(said)}"
    return f"{name} is {value[1][:MOST_SHOWN]}, but must be {' or '.join(kinds)}"


def _culprit(directory: Path, said: str) -> str:
    """The field that alone leads to the same error, else the file."""
    raw = _read(directory / "config.json")
    fields = raw if isinstance(raw, dict) else {}
    known = CONFIG_MAPPING[str(fields.get("model_type"))]
    for name, value in fields.items():
        try:
            known.from_dict({name: value})
        except FOREIGN as error:
            if str(error) == said:
                return f"{name} {_shown(value)} in config.json"
    return "config.json"


def _read(path: Path) -> JSON:
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
    raw: JSON = json.loads(path.read_text("utf-8"))
    return raw


def _wrong(raw: Mapping[str, JSON]) -> Iterator[str]:
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        yield _must("model_type", kind, "the name of an architecture")
    elif kind not in CONFIG_MAPPING and "auto_map" not in raw:
        yield f"model_type is {_shown(kind)}, which this version of `transformers` does not know"
    for name, most in _COUNTS.items():
        value = raw.get(name)
        if name not in raw or isinstance(value, list):  # some models have one for each layer
            continue
        if name in _NO_NULL if value is None else not _count(value, most):
            yield _must(name, value, f"a whole number from 1 to {most}")
    yield from _heads(raw)
    for name in _EPSILONS:
        epsilon = _number(raw.get(name))
        if raw.get(name) is not None and (epsilon is None or not 0 <= epsilon < 1):
            yield _must(name, raw[name], "a small number such as 1e-05")
    yield from _names(raw)
    for name in _WINDOWS:
        value = raw.get(name)
        if value is None or isinstance(value, list) or raw.get("use_sliding_window") is False:
            continue
        if not _count(value):
            yield _must(name, value, "null or a whole number from 1 on")
    for name in _ROPES:
        yield from _rope(name, raw.get(name), raw)
    if raw.get("rope_theta") is not None and not _positive(raw["rope_theta"]):
        yield _must("rope_theta", raw["rope_theta"], _POSITIVE)
    if not isinstance(raw.get("quantization_config", {}), dict | None):
        yield _must("quantization_config", raw["quantization_config"], "an object")


def _endings(directory: Path, raw: Mapping[str, JSON]) -> Iterator[str]:
    """The end of a sequence. A list may have ids of no token, if another one is valid."""
    name, value = "eos_token_id", raw.get("eos_token_id")
    path = directory / "generation_config.json"
    try:
        own = _read(path) if path.is_file() else None
    except (ValueError, RecursionError) as error:
        yield f"{path.name} cannot be read as JSON ({_line(str(error))}): download it again"
        return
    if isinstance(own, dict) and own.get(name) not in (None, []):
        name, value = f"{name} in {path.name}", own[name]
    ids = value if isinstance(value, list) else [] if value is None else [value]
    size = _count(raw.get("vocab_size"))
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        yield _must(name, value, "a token id, a list of them, or null")
    elif size and ids and not any(isinstance(one, int) and 0 <= one < size for one in ids):
        last = size - 1
        yield _must(name, value, f"a token id from 0 to {last}, or null for a model without an end")


def _heads(raw: Mapping[str, JSON]) -> Iterator[str]:
    heads = _count(raw.get("num_attention_heads"))
    shared = _count(raw.get("num_key_value_heads"))
    if heads and shared and heads % shared:
        yield f"num_key_value_heads is {shared}, which does not divide num_attention_heads {heads}"


def _names(raw: Mapping[str, JSON]) -> Iterator[str]:
    """Values that name something of `transformers` or torch."""
    for name in _ACTIVATIONS:
        value = raw.get(name)
        if isinstance(value, str) and value not in ACT2FN:
            yield _must(name, value, "the name of an activation, such as silu")
    for name in ("dtype", "torch_dtype"):
        value = raw.get(name)
        if value is not None and not isinstance(_dtype(value), torch.dtype):
            yield _must(name, value, "a number format, such as bfloat16")
    kinds = raw.get("layer_types")
    if kinds is None:
        return
    layers = raw.get("num_hidden_layers")
    if not isinstance(kinds, list) or (isinstance(layers, int) and len(kinds) != layers):
        yield _must("layer_types", kinds, f"a list of {layers} names, one for each layer")
        return
    known = _layer_types(raw.get("model_type"))
    if unknown := [kind for kind in kinds if kind not in known]:
        yield f"layer_types names {_shown(unknown[0])}, which `transformers` does not know"


def _layer_types(architecture: JSON) -> tuple[str, ...]:
    """All names of layers: not every architecture's own are in the list of `transformers`."""
    try:
        own = CONFIG_MAPPING[str(architecture)]().to_dict().get("layer_types")  # as it is saved
    except FOREIGN:
        own = None
    return (*ALLOWED_LAYER_TYPES, *(own or ()))


def _rope(name: str, value: JSON, raw: Mapping[str, JSON]) -> Iterator[str]:
    if value is None:
        return
    if not isinstance(value, dict):
        yield _must(name, value, "an object, such as {'rope_type': 'default'}")
        return
    kinds = raw.get("layer_types")
    nested = set(ALLOWED_LAYER_TYPES) | set(map(str, kinds if isinstance(kinds, list) else ()))
    for key, inner in value.items():
        if isinstance(inner, dict) or key in nested:  # settings of one kind of layer
            yield from _rope(f"{name}.{key}", inner, raw)
    kind = value.get("rope_type", value.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_TYPES:
        yield _must(f"{name}.rope_type", kind, f"one of {', '.join(sorted(_ROPE_TYPES))}")
    for key in _ROPE_FACTORS:
        given = value.get(key) is not None or (key == "rope_theta" and key in value)
        if given and not _positive(value[key]):
            yield _must(f"{name}.{key}", value[key], _POSITIVE)
    if value.get("factor") is not None and (_positive(value["factor"]) or 0) < 1:
        yield _must(f"{name}.factor", value["factor"], "a number from 1 on")
    original = value.get("original_max_position_embeddings")
    if original is not None and not _count(original, MOST_POSITIONS):
        wanted = "a whole number from 1 on"
        yield _must(f"{name}.original_max_position_embeddings", original, wanted)
    low = _positive(value.get("low_freq_factor"))
    high = _positive(value.get("high_freq_factor"))
    if low and high and low >= high:
        yield f"{name}.low_freq_factor is {low:g}, not below high_freq_factor {high:g}"
    share = value.get("partial_rotary_factor")
    if share is not None and not 0 < (_positive(share) or 0) <= 1:
        yield _must(f"{name}.partial_rotary_factor", share, "above 0 and at most 1")
    for key in _ROPE_LISTS:
        if value.get(key) is not None:
            yield from _rope_list(f"{name}.{key}", value[key], _frequencies(raw, value))


def _rope_list(name: str, value: JSON, count: int | None) -> Iterator[str]:
    if not isinstance(value, list) or not all(map(_positive, value)):
        yield _must(name, value, "a list of positive numbers")
    elif count is not None and len(value) != count:
        yield f"{name} has {len(value)} numbers, but must have {count}, half of the width of a head"


def _frequencies(raw: Mapping[str, JSON], rope: Mapping[str, JSON]) -> int | None:
    """Frequencies of a rotation, if the width of a head is known."""
    width = _count(raw.get("head_dim"))
    size, heads = _count(raw.get("hidden_size")), _count(raw.get("num_attention_heads"))
    if width is None and size and heads:
        width = size // heads
    share = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    part = 1.0 if share is None else _positive(share)
    return None if width is None or part is None else int(width * part) // 2


def _dtype(name: JSON) -> object:
    return getattr(torch, name, None) if isinstance(name, str) else None


def _count(value: JSON, most: int = 1 << 62) -> int | None:
    """The value if it is a whole number from 1 to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 1 <= value <= most else None


def _number(value: JSON) -> float | None:
    """The value if it is a number that float32 can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST else None  # NaN is not


def _positive(value: JSON) -> float | None:
    number = _number(value)
    return number if number is not None and number > 0 else None


def _must(name: str, value: JSON, wanted: str) -> str:
    return f"{name} is {_shown(value)}, but must be {wanted}"


def _shown(value: JSON) -> str:
    text = json.dumps(value) if not isinstance(value, str) else repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _line(text: str) -> str:
    return " ".join(text.split())[:LONGEST].rstrip(".")
