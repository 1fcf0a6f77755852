"""The weights of Llama, Mistral, Qwen2 and Qwen3, taken out of `transformers` modules and packed.

Q, K and V become one product, gate and up another. Each module is dropped as soon as its weights
are packed, so memory never holds both copies of all weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from kvrelay.engine.model.elementwise import vectorised
from kvrelay.engine.model.packed_linear import Linear, linear, stacked

_KNOWN = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
SHORTEST = 1024
"""Positions that can be rotated at least: the self-test of a GPU and the probe have fewer."""

_AT_ONCE = 4096  # positions whose angles are computed together


class _HfNorm(Protocol):
    weight: torch.Tensor
    variance_epsilon: float


class _HfAttention(Protocol):
    q_proj: torch.nn.Linear
    k_proj: torch.nn.Linear
    v_proj: torch.nn.Linear
    o_proj: torch.nn.Linear
    q_norm: _HfNorm  # Qwen3 alone has these
    k_norm: _HfNorm
    head_dim: int
    scaling: float


class _HfMlp(Protocol):
    gate_proj: torch.nn.Linear
    up_proj: torch.nn.Linear
    down_proj: torch.nn.Linear


class _HfLayer(Protocol):
    input_layernorm: _HfNorm
    self_attn: _HfAttention
    post_attention_layernorm: _HfNorm
    mlp: _HfMlp


class _HfRotary(Protocol):
    inv_freq: torch.Tensor
    attention_scaling: float


class _HfBase(Protocol):
    embed_tokens: torch.nn.Embedding
    rotary_emb: _HfRotary
    norm: _HfNorm
    layers: torch.nn.ModuleList


class _HfModel(Protocol):
    """The modules of a known model, as `transformers` names them."""

    model: _HfBase
    lm_head: torch.nn.Linear


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Root-mean-square norm in float32, rounded before the weight is applied."""

    weight: torch.Tensor
    epsilon: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        wide = rows.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.epsilon)
        return (wide * scale).to(rows.dtype).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One decoder layer."""

    before_attention: RmsNorm
    qkv: Linear
    heads_norm: RmsNorm | None
    out: Linear
    before_mlp: RmsNorm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How a row of the joint product is cut: query heads, then key heads, then value heads."""

    queries: int
    keys: int
    width: int
    scaling: float


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a model.

    ``embedding`` is [vocab, hidden]; ``angles`` [positions, 2, width / 2] are the cosines and sines
    of every position that is served.
    """

    heads: HeadLayout
    embedding: torch.Tensor
    angles: torch.Tensor
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm
    head: Linear


def extract_weights(model: PreTrainedModel, positions: int) -> DecoderWeights | None:
    """The weights of a known model, whose modules are dropped; ``None`` for any other model.

    ``positions`` is the length of the longest sequence.
    """
    config = model.config
    if type(model) not in _KNOWN or getattr(config, "hidden_act", None) != "silu":
        return None
    source = cast(_HfModel, model)
    modules = source.model.layers
    first = cast(_HfLayer, modules[0]).self_attn
    heads = HeadLayout(
        config.num_attention_heads, config.num_key_value_heads, first.head_dim, first.scaling
    )
    rotary = source.model.rotary_emb
    if 2 * rotary.inv_freq.shape[0] != first.head_dim:  # only a part of a head is rotated
        return None
    layers = []
    for number, layer in enumerate(modules):
        layers.append(_layer(cast(_HfLayer, layer), heads))
        modules[number] = torch.nn.Identity()
    base = source.model
    embedding, norm = base.embed_tokens.weight.detach(), _norm(base.norm)
    angles = _angles(rotary, max(positions, SHORTEST), embedding.dtype)
    return DecoderWeights(heads, embedding, angles, tuple(layers), norm, linear(source.lm_head))


def _angles(rotary: _HfRotary, positions: int, dtype: torch.dtype) -> torch.Tensor:
    """Cosines and sines of float32 angles, as `transformers` has them, by functions in float64.

    The frequencies are those at the start. The kinds that change with the length of a sequence are
    served only below the length at which they change (``model.capability``).
    """
    frequencies = rotary.inv_freq.detach().float()
    made = torch.empty((positions, 2, frequencies.shape[0]), dtype=dtype, device=frequencies.device)
    for first in range(0, positions, _AT_ONCE):
        numbers = torch.arange(first, min(first + _AT_ONCE, positions), device=frequencies.device)
        angles = (numbers[:, None].float() * frequencies).double()
        for part, function in enumerate((torch.cos, torch.sin)):
            values = vectorised(function, angles).float() * rotary.attention_scaling
            made[first : first + _AT_ONCE, part] = values.to(dtype)
    return made


def _layer(layer: _HfLayer, heads: HeadLayout) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return DecoderLayer(
        before_attention=_norm(layer.input_layernorm),
        qkv=stacked((attention.q_proj, attention.k_proj, attention.v_proj)),
        heads_norm=_heads_norm(attention, heads),
        out=linear(attention.o_proj),
        before_mlp=_norm(layer.post_attention_layernorm),
        gate_up=stacked((mlp.gate_proj, mlp.up_proj)),
        down=linear(mlp.down_proj),
    )


def _norm(module: _HfNorm) -> RmsNorm:
    return RmsNorm(module.weight.detach(), module.variance_epsilon)


def _heads_norm(attention: _HfAttention, heads: HeadLayout) -> RmsNorm | None:
    if not hasattr(attention, "q_norm"):
        return None
    queries, keys = _norm(attention.q_norm), _norm(attention.k_norm)
    weights = [queries.weight] * heads.queries + [keys.weight] * heads.keys
    return RmsNorm(torch.stack(weights), queries.epsilon)
