"""Checks, before the weights load, whether a model can be served exactly.

Each check is for a property that would make an answer wrong (a window shorter than the longest
sequence, frequencies that depend on the batch), never for a model's name. Every reason is
collected, those included that ``model.probe`` observes in the modules without weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from kvrelay.engine.model.config_values import foreign_reason
from kvrelay.engine.model.pretrained import FOREIGN, skeleton
from kvrelay.engine.model.probe import observed_reasons
from kvrelay.errors import Unservable
from kvrelay.model_folder import joined

OTHER_MODEL = "; no option changes that: choose another model"
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_RECURRENT = {"linear_attention", "conv"}
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def servable_length(config: PreTrainedConfig, asked: int | None, known: Sequence[str] = ()) -> int:
    """The longest sequence to serve: ``asked``, or the limit in the model's config.

    Raises ``Unservable`` with every reason against the model, the ``known`` ones included.
    """
    fixed = [*known, *_format_reasons(config)]
    if (kind := _kind_reason(config)) is not None:  # its length and modules would say nothing
        raise Unservable(joined([kind, *fixed]) + OTHER_MODEL)
    limit = position_limit(config)
    fixed += _length_reasons(asked, limit)
    length = min((n for n in (asked, limit) if n is not None and n > 0), default=1)
    try:
        model = skeleton(config)
    except FOREIGN as error:
        known = [*fixed, *_config_reasons(config, length)] or [foreign_reason(error)]
        raise Unservable(joined(known)) from error
    reasons = _reasons(config, model, length)
    if fixed or reasons:
        raise Unservable(joined([*fixed, *reasons]) + _advice(config, model, reasons, fixed))
    return length


def _kind_reason(config: PreTrainedConfig) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder model: only decoder-only text models are served"
    if config.get_text_config() is not config or getattr(config, "vision_config", None):
        return "a multimodal model: only text models are served, such as a text-only checkpoint"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"a model of type {config.model_type!r}, which is no causal language model"
    if (kinds := set(getattr(config, "layer_types", None) or ())) and kinds <= _RECURRENT:
        named = " or ".join(map(repr, sorted(kinds)))
        return (
            f"a recurrent model (every layer is of type {named}), such as Mamba: it keeps a state"
            " in place of keys and values, so it has no KV blocks"
        )
    return _class_reason(config)


def _class_reason(config: PreTrainedConfig) -> str | None:
    """A checkpoint of another head has no weights for ours, or tied ones that were trained away.

    A class that `transformers` does not know may be a causal language model under another name.
    """
    named, known = config.architectures or [], MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    wanted = known.get(str(config.model_type))
    others = [name for name in named if name in known.values() or not name.endswith(_CAUSAL)]
    if wanted in named or len(others) < len(named) or not named:
        return None
    return (
        f"a checkpoint of {' and '.join(named)} (architectures in config.json), where model type"
        f" {config.model_type!r} means {wanted}"
    )


def _format_reasons(config: PreTrainedConfig) -> Iterator[str]:
    names = ("quantization_config", "compression_config")
    if any(getattr(config, name, None) is not None for name in names):
        yield (
            "quantised weights: only float32, bfloat16 and float16 are served, so take the"
            " original checkpoint"
        )


def position_limit(config: PreTrainedConfig) -> int | None:
    """The longest sequence that the config allows; ``None`` if it names no limit."""
    lengths = (_integer(config, name) for name in _LENGTHS)
    return next((length for length in lengths if length is not None and length > 0), None)


def _length_reasons(asked: int | None, limit: int | None) -> Iterator[str]:
    if asked is None and limit is None:
        yield "the model's config names no maximum length: give one (max_model_len)"
    if asked is not None and asked < 1:
        yield f"max_model_len must be at least 1, got {asked}"
    if asked is not None and limit is not None and asked > limit:
        yield f"max_model_len {asked} exceeds the model's own limit of {limit}"


def _reasons(
    config: PreTrainedConfig, model: PreTrainedModel, length: int
) -> dict[str, int | None]:
    """Reasons against sequences of this length.

    Each with the length up to which it does not hold, ``None`` if it always does.
    """
    reasons = _config_reasons(config, length)
    for name, module in model.named_modules():
        for rope in _ropes(module):
            reasons.update(_rope_reasons(name, rope, module, length))
    if not type(model)._supports_attention_backend or not model._can_set_attn_implementation():
        reason = (
            f"{type(model).__name__} of `transformers` does not call its attention through the"
            " attention interface, by which KV blocks get in"
        )
        return {**reasons, reason: None}
    return {**reasons, **dict.fromkeys(observed_reasons(model, 0 if reasons else length))}


def _config_reasons(config: PreTrainedConfig, length: int) -> dict[str, int | None]:
    reasons = dict((*_layer_types(config, length), *_windows(config, length)))
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "") == "alibi":
        reasons["ALiBi position biases: attention with a bias is not implemented"] = None
    return reasons


def _advice(
    config: PreTrainedConfig,
    model: PreTrainedModel,
    reasons: dict[str, int | None],
    fixed: Sequence[str],
) -> str:
    """Whether shorter sequences could be served: only if no reason is left against them."""
    lengths = [length for length in reasons.values() if length is not None]
    if len(lengths) < len(reasons) or (lengths and _reasons(config, model, min(lengths))):
        return OTHER_MODEL
    return f"; max_model_len {min(lengths)} would do" if lengths and not fixed else ""


def _layer_types(config: PreTrainedConfig, length: int) -> Iterator[tuple[str, int | None]]:
    for kind in dict.fromkeys(getattr(config, "layer_types", None) or ()):
        if kind == "full_attention":
            continue
        if kind not in _WINDOWS:
            yield f"layers of type {kind!r}: only full attention is implemented", None
        elif (window := _integer(config, _WINDOWS[kind])) is None or window < length:
            yield _too_narrow(f"layers of type {kind!r}", window, length), window


def _windows(config: PreTrainedConfig, length: int) -> Iterator[tuple[str, int | None]]:
    if getattr(config, "layer_types", None):  # each layer's type says whether it uses the window
        return
    window = _integer(config, "sliding_window")
    if window is not None and window < length and getattr(config, "use_sliding_window", True):
        yield _too_narrow("sliding-window attention", window, length), window


def _too_narrow(what: str, window: int | None, length: int) -> str:
    return (
        f"{what} with a window of {window}, shorter than sequences of up to {length}: only full"
        " attention is implemented"
    )


def _ropes(module: torch.nn.Module) -> list[str]:
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        return [kinds]
    return [str(kind) for kind in kinds.values()] if isinstance(kinds, dict) else []


def _rope_reasons(
    name: str, rope: str, module: torch.nn.Module, length: int
) -> Iterator[tuple[str, int | None]]:
    """`transformers` chooses these frequencies by the longest position in the batch."""
    if "dynamic" in rope:
        limit = getattr(module, "original_max_seq_len", None)
    elif rope == "longrope":
        limit = _original_length(module)
    else:
        return
    known = limit if isinstance(limit, int) else None
    if known is None or length > known:
        yield f"rope type {rope!r} in {name}: frequencies depend on the length", known


def _original_length(module: torch.nn.Module) -> object:
    rope = getattr(getattr(module, "config", None), "rope_parameters", None)
    return rope.get("original_max_position_embeddings") if isinstance(rope, dict) else None


def _integer(config: PreTrainedConfig, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
