"""Tiny models with random weights, one for each shape of decoder the engine must serve.

Weights are large enough (standard deviation 0.3 or so) that the gap between the two most likely
tokens dwarfs rounding in float32, and that greedy output does not fall into one token.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.random_model import save_tokenizer

VOCAB = 288
EOS = 256  # as in the byte-level tokenizer
STD = 0.3

_COMMON: Mapping[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts_per_tok": 2, "sliding_window": None}

# kind -> (model type, what differs from the common settings)
KINDS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"head_dim": 24, "sliding_window": None}),
    "mixtral": ("mixtral", {**_EXPERTS, "num_local_experts": 4}),
    "qwen3-moe": (
        "qwen3_moe",
        {**_EXPERTS, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32},
    ),
    "gpt-neox": ("gpt_neox", {}),
    "gpt2": ("gpt2", {}),
    "lfm2": ("lfm2", {"layer_types": ["full_attention"] * 2}),  # its activation is a function
}


def tiny_model(
    kind: str,
    directory: Path,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **settings: object,
) -> Path:
    """Write config, weights and a byte-level tokenizer; ``settings`` override the config's.

    Every matrix is normal with standard deviation ``STD`` (biases and norms too, around their
    start), from ``seed``.
    """
    model_type, own = KINDS[kind]
    config = AutoConfig.for_model(model_type, **{**_COMMON, **own, **settings})
    model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.empty_like(parameter).normal_(0.0, STD, generator=generator)
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise / 3)
    model.to(dtype).save_pretrained(directory)  # type: ignore[arg-type]
    save_tokenizer(directory, VOCAB)
    return directory
