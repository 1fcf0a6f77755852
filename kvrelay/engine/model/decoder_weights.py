"""The weights of Llama, Mistral, Qwen2 and Qwen3, taken out of `transformers` modules and packed.

Q, K and V become one product and gate and up another. The modules are taken apart on the way, so
that both copies of the weights never stand side by side.
"""

from __future__ import annotations

from collections.abc import Callable
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

from kvrelay.engine.model.packed_linear import Linear, linear, stacked

_KNOWN = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
Rotary = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class _TheirNorm(Protocol):
    weight: torch.Tensor
    variance_epsilon: float


class _TheirAttention(Protocol):
    q_proj: torch.nn.Linear
    k_proj: torch.nn.Linear
    v_proj: torch.nn.Linear
    o_proj: torch.nn.Linear
    head_dim: int
    scaling: float


class _NormedAttention(Protocol):
    q_norm: _TheirNorm
    k_norm: _TheirNorm


class _TheirMlp(Protocol):
    gate_proj: torch.nn.Linear
    up_proj: torch.nn.Linear
    down_proj: torch.nn.Linear


class _TheirLayer(Protocol):
    input_layernorm: _TheirNorm
    self_attn: _TheirAttention
    post_attention_layernorm: _TheirNorm
    mlp: _TheirMlp


class _TheirBase(Protocol):
    embed_tokens: torch.nn.Embedding
    rotary_emb: Rotary
    norm: _TheirNorm
    layers: torch.nn.ModuleList


class _Theirs(Protocol):
    """The modules of a known model, as `transformers` names them."""

    model: _TheirBase
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
    """All of a model: ``embedding`` [vocab, hidden], the layers, and what stands around them."""

    heads: HeadLayout
    embedding: torch.Tensor
    rotary: Rotary
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm
    head: Linear


def weights(model: PreTrainedModel) -> DecoderWeights | None:
    """The weights of a known model, which is of no use afterwards; ``None`` for any other."""
    config = model.config
    if type(model) not in _KNOWN or getattr(config, "hidden_act", None) != "silu":
        return None
    theirs = cast(_Theirs, model)
    modules = theirs.model.layers
    first = cast(_TheirLayer, modules[0]).self_attn
    heads = HeadLayout(
        config.num_attention_heads, config.num_key_value_heads, first.head_dim, first.scaling
    )
    layers = []
    for number, layer in enumerate(modules):
        layers.append(_layer(cast(_TheirLayer, layer), heads))
        modules[number] = torch.nn.Identity()
    base = theirs.model
    embedding, norm = base.embed_tokens.weight.detach(), _norm(base.norm)
    return DecoderWeights(
        heads, embedding, base.rotary_emb, tuple(layers), norm, linear(theirs.lm_head)
    )


def _layer(layer: _TheirLayer, heads: HeadLayout) -> DecoderLayer:
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


def _norm(module: _TheirNorm) -> RmsNorm:
    return RmsNorm(module.weight.detach(), module.variance_epsilon)


def _heads_norm(attention: _TheirAttention, heads: HeadLayout) -> RmsNorm | None:
    if not hasattr(attention, "q_norm"):
        return None
    normed = cast(_NormedAttention, attention)
    queries, keys = _norm(normed.q_norm), _norm(normed.k_norm)
    weights = [queries.weight] * heads.queries + [keys.weight] * heads.keys
    return RmsNorm(torch.stack(weights), queries.epsilon)
