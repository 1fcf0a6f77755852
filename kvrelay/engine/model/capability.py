"""Checks, before the weights load, whether a model can be served exactly.

Each check is for a property that would make an answer wrong (a window shorter than the longest
sequence, frequencies that depend on the batch), never for a model's name. ``model.probe`` then
observes the loaded model and compares it with itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvrelay.errors import Unservable

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def longest(config: PreTrainedConfig, asked: int | None) -> int:
    """The longest sequence to serve: ``asked``, or the limit in the model's config.

    Raises ``Unservable`` if neither exists, or if ``asked`` exceeds the limit.
    """
    limit = next((n for name in _LENGTHS if (n := _integer(config, name)) is not None), None)
    if asked is None and limit is None:
        raise Unservable("the model's config names no maximum length: give one (max_model_len)")
    if asked is not None and limit is not None and asked > limit:
        raise Unservable(f"max_model_len {asked} exceeds the model's own limit of {limit}")
    length = asked if asked is not None else limit
    if length is None or length < 1:
        raise Unservable(f"max_model_len must be at least 1, got {length}")
    return length


def check_config(config: PreTrainedConfig, max_len: int) -> None:
    """Raise ``Unservable`` for what the config shows."""
    if getattr(config, "is_encoder_decoder", False):
        raise Unservable("an encoder-decoder model: only decoders are served")
    if config.get_text_config() is not config or getattr(config, "vision_config", None):
        raise Unservable("a multimodal model: only text decoders are served")
    if getattr(config, "quantization_config", None) is not None:
        raise Unservable("quantised weights: only float32, bfloat16 and float16 are served")
    for reason in (*_layer_types(config, max_len), *_windows(config, max_len)):
        raise Unservable(reason)
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "") == "alibi":
        raise Unservable("ALiBi position biases: attention with a bias is not implemented")
    for name in ("attn_logit_softcapping", "attn_logit_cap"):
        if getattr(config, name, None):
            raise Unservable(f"soft-capped attention logits ({name}): not implemented")


def check_modules(model: PreTrainedModel, max_len: int) -> None:
    """Raise ``Unservable`` for what the modules show, for example on the meta device."""
    kind = type(model).__name__
    if not type(model)._supports_attention_backend or not model._can_set_attn_implementation():
        raise Unservable(f"{kind} does not call its attention through the attention interface")
    for name, module in model.named_modules():
        if getattr(module, "sinks", None) is not None:
            raise Unservable(f"attention sinks in {name}: not implemented")
        for rope in _ropes(module):
            _check_rope(name, rope, module, max_len)


def _layer_types(config: PreTrainedConfig, max_len: int) -> Iterator[str]:
    for kind in dict.fromkeys(getattr(config, "layer_types", None) or ()):
        if kind == "full_attention":
            continue
        if kind not in _WINDOWS:
            yield f"layers of type {kind!r}: only full attention is implemented"
        elif (window := _integer(config, _WINDOWS[kind])) is None or window < max_len:
            yield _too_narrow(f"layers of type {kind!r}", window, max_len)


def _windows(config: PreTrainedConfig, max_len: int) -> Iterator[str]:
    if getattr(config, "layer_types", None):  # each layer's type says whether it uses the window
        return
    window = _integer(config, "sliding_window")
    if window is not None and window < max_len and getattr(config, "use_sliding_window", True):
        yield _too_narrow("sliding-window attention", window, max_len)


def _too_narrow(what: str, window: int | None, max_len: int) -> str:
    reason = f"{what} with a window of {window}, shorter than sequences of up to {max_len}"
    return (
        reason if window is None else f"{reason}: not implemented; max_model_len {window} would do"
    )


def _ropes(module: torch.nn.Module) -> list[str]:
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        return [kinds]
    return [str(kind) for kind in kinds.values()] if isinstance(kinds, dict) else []


def _check_rope(name: str, rope: str, module: torch.nn.Module, max_len: int) -> None:
    """`transformers` chooses these frequencies by the longest position in the batch."""
    if "dynamic" in rope:
        limit = getattr(module, "original_max_seq_len", None)
    elif rope == "longrope":
        limit = _original_length(module)
    else:
        return
    if not isinstance(limit, int) or max_len > limit:
        hint = "" if limit is None else f"; max_model_len {limit} would do"
        raise Unservable(f"rope type {rope!r} in {name}: frequencies depend on the length{hint}")


def _original_length(module: torch.nn.Module) -> object:
    rope = getattr(getattr(module, "config", None), "rope_parameters", None)
    return rope.get("original_max_position_embeddings") if isinstance(rope, dict) else None


def _integer(config: PreTrainedConfig, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
