"""Models of a real shape with random weights, in ordinary `transformers` format, for benchmarks.

The cost of a model depends on its shape alone; its text is noise. Every token id has a text, so a
stream of any ids can be shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvrelay.errors import Rejected

END = "<|end|>"
_BYTES = 256
_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\nCall one as <tool_call>\n"
    '{"name": <name>, "arguments": <arguments>}\n</tool_call>\n{% endif %}'
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n"
    "</tool_call>\n{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder, named as in `transformers` configs."""

    model_type: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool


SHAPES: Mapping[str, ModelShape] = {
    "qwen3-0.6b": ModelShape("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, True),
    "llama-toy": ModelShape("llama", 4, 256, 688, 8, 4, 32, 2048, 4096, False),
    "llama-tiny": ModelShape("llama", 2, 64, 160, 4, 2, 16, 512, 2048, False),
    "qwen3-tiny": ModelShape("qwen3", 2, 64, 160, 4, 2, 32, 512, 2048, True),
}


def make_model(
    shape: str,
    out: Path,
    dtype: str = "bfloat16",
    seed: int = 0,
    on_progress: Callable[[float], None] = lambda done: None,
) -> Path:
    """Write config, weights and tokenizer of one of ``SHAPES`` to the directory ``out``.

    ``on_progress`` gets the share of the weights that are drawn, 1 before they are written.

    ``dtype`` is "bfloat16", "float16" or "float32"; weights are normal with the config's
    ``initializer_range``, norms are 1. Raises ``Rejected`` for an unknown name.
    """
    if shape not in SHAPES:
        raise Rejected("shape", f"{shape!r} is not one of {', '.join(SHAPES)}")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise Rejected("dtype", f"{dtype!r} is not bfloat16, float16 or float32")
    config = _config(SHAPES[shape], dtype)
    out.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(out)
    weights = out / "model.safetensors"
    save_file(_weights(config, dtype, seed, on_progress), weights, {"format": "pt"})
    weights.chmod((out / "config.json").stat().st_mode)  # save_file lets only its user read it
    save_tokenizer(out, SHAPES[shape].vocab_size)
    return out


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """One token for each byte, then the end of text, then invented words used by decoding only.

    Encoding gives one id per byte of the text's UTF-8, so any text goes in and comes out.
    """
    if vocab_size <= _BYTES:
        raise Rejected("vocab_size", f"must exceed {_BYTES}, got {vocab_size}")
    vocab = {
        symbol: token for token, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    vocab[END] = _BYTES
    vocab |= {_word(token): token for token in range(_BYTES + 1, vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, with a plain chat template."""
    byte_tokenizer(vocab_size).save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "chat_template": _TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _config(shape: ModelShape, dtype: str) -> PreTrainedConfig:
    sizes = {field: getattr(shape, field) for field in shape.__slots__ if field != "model_type"}
    ends = {"eos_token_id": _BYTES, "bos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(shape.model_type, **sizes, **ends, dtype=dtype)
    build = cast(Callable[..., PreTrainedModel], AutoModelForCausalLM.from_config)
    with torch.device("meta"):
        config.architectures = [type(build(config)).__name__]
    return config


def _weights(
    config: PreTrainedConfig, dtype: str, seed: int, on_progress: Callable[[float], None]
) -> dict[str, torch.Tensor]:
    build = cast(Callable[..., PreTrainedModel], AutoModelForCausalLM.from_config)
    with torch.device("meta"):
        model = build(config)
    generator = torch.Generator().manual_seed(seed)
    std = cast(float, getattr(config, "initializer_range", 0.02))
    weights = {}
    total, drawn = sum(one.numel() for one in model.parameters()), 0
    for name, parameter in model.named_parameters():
        on_progress(drawn / total)
        drawn += parameter.numel()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = torch.empty(parameter.shape, dtype=getattr(torch, dtype))
        weights[name] = (
            tensor.fill_(1.0) if tensor.dim() == 1 else tensor.normal_(0, std, generator=generator)
        )
    on_progress(1.0)
    return weights


def _word(token: int) -> str:
    """A distinct word for every id: a space (as byte-level tokens write it) and letters."""
    letters, rest = "", token
    while rest:
        rest, digit = divmod(rest - 1, len(_LETTERS))
        letters = _LETTERS[digit] + letters
    return "\u0120" + letters
