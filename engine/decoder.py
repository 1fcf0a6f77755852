"""Llama, Mistral, Qwen2 and Qwen3 written out: the same arithmetic with fewer, larger operations.

Q, K and V are one product, gate and up are another, and Q and K are normed and rotated together.
Every rounding stands where `transformers` has it, so bfloat16 agrees too. Which of the two forwards
runs is decided at start, and the probe holds either against the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch.nn.functional import silu
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from engine.attention import AttentionStep
from engine.packed_linear import Linear, linear, stacked

_KNOWN = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


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
    rotary_emb: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    norm: _TheirNorm
    layers: torch.nn.ModuleList


class _Theirs(Protocol):
    """The modules of a known model, as `transformers` names them."""

    model: _TheirBase
    lm_head: torch.nn.Linear


@dataclass(frozen=True, slots=True)
class _Norm:
    """Root-mean-square norm in float32, rounded before the weight is applied."""

    weight: torch.Tensor
    epsilon: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        wide = rows.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.epsilon)
        return (wide * scale).to(rows.dtype).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class _Layer:
    before_attention: _Norm
    qkv: Linear
    heads_norm: _Norm | None
    out: Linear
    before_mlp: _Norm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class _Heads:
    """How a row of the joint product is cut: query heads, then key heads, then value heads."""

    queries: int
    keys: int
    width: int
    scaling: float


class Decoder:
    """The layers of a known model, its weights packed and owned here."""

    def __init__(self, model: _Theirs, heads: _Heads, layers: list[_Layer]) -> None:
        base = model.model
        self._embedding = base.embed_tokens.weight.detach()
        self._rotary = base.rotary_emb
        self._norm = _norm(base.norm)
        self._head = linear(model.lm_head)
        self._heads = heads
        self._layers = layers

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """See ``Forward.logits``."""
        hidden = self._embedding[tokens[0]]
        cos, sin = self._angles(hidden, positions)
        for number, layer in enumerate(self._layers):
            attended = self._attend(layer, number, layer.before_attention(hidden), cos, sin, step)
            hidden = layer.out(attended).add_(hidden)
            gate, up = layer.gate_up(layer.before_mlp(hidden)).chunk(2, -1)
            hidden = layer.down(silu(gate).mul_(up)).add_(hidden)
        return self._head(self._norm(hidden[rows]))

    def _attend(
        self,
        layer: _Layer,
        number: int,
        rows: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: AttentionStep,
    ) -> torch.Tensor:
        """[T, hidden] to [T, query heads * width]."""
        cut = self._heads
        joint = layer.qkv(rows).view(rows.shape[0], -1, cut.width)
        turning = joint[:, : cut.queries + cut.keys]
        if layer.heads_norm is not None:
            turning = layer.heads_norm(turning)
        turned = (turning * cos).add_(turning.roll(cut.width // 2, -1).mul_(sin))
        query, key = turned[:, : cut.queries], turned[:, cut.queries :]
        value = joint[:, cut.queries + cut.keys :]
        return step.attend(number, query, key, value, cut.scaling).view(rows.shape[0], -1)

    def _angles(
        self, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, 1, width]; the first half of the sines carries the minus sign.

        Rotating is ``x * cos + (-second half, first half) * sin``: with the sign in the sine, the
        halves only swap.
        """
        cos, sin = self._rotary(hidden, positions)
        half = self._heads.width // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        return cos[0][:, None], signed[0][:, None]


def decoder(model: PreTrainedModel) -> Decoder | None:
    """The model written out, or ``None`` when it is not exactly one that is known.

    Takes the model apart: its layers' weights are packed one by one and then let go.
    """
    config = model.config
    if type(model) not in _KNOWN or getattr(config, "hidden_act", None) != "silu":
        return None
    theirs = cast(_Theirs, model)
    modules = theirs.model.layers
    first = cast(_TheirLayer, modules[0]).self_attn
    heads = _Heads(
        config.num_attention_heads, config.num_key_value_heads, first.head_dim, first.scaling
    )
    layers = []
    for number, layer in enumerate(modules):
        layers.append(_layer(cast(_TheirLayer, layer), heads))
        modules[number] = torch.nn.Identity()
    return Decoder(theirs, heads, layers)


def _layer(layer: _TheirLayer, heads: _Heads) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        before_attention=_norm(layer.input_layernorm),
        qkv=stacked((attention.q_proj, attention.k_proj, attention.v_proj)),
        heads_norm=_heads_norm(attention, heads),
        out=linear(attention.o_proj),
        before_mlp=_norm(layer.post_attention_layernorm),
        gate_up=stacked((mlp.gate_proj, mlp.up_proj)),
        down=linear(mlp.down_proj),
    )


def _norm(module: _TheirNorm) -> _Norm:
    return _Norm(module.weight.detach(), module.variance_epsilon)


def _heads_norm(attention: _TheirAttention, heads: _Heads) -> _Norm | None:
    if not hasattr(attention, "q_norm"):
        return None
    normed = cast(_NormedAttention, attention)
    queries, keys = _norm(normed.q_norm), _norm(normed.k_norm)
    weights = [queries.weight] * heads.queries + [keys.weight] * heads.keys
    return _Norm(torch.stack(weights), queries.epsilon)
