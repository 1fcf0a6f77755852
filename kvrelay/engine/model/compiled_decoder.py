"""The forward pass of a known model in one call of compiled code.

The operations and all roundings are those of ``model.native_decoder``, so the bits are the same.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from kvrelay.engine.attention.backend import AttentionStep
from kvrelay.engine.attention.native import forward
from kvrelay.engine.attention.native.arguments import KINDS
from kvrelay.engine.attention.native.backend import NativeBackend, NativeStep
from kvrelay.engine.attention.native.build import PLAIN
from kvrelay.engine.attention.native.library import open_object
from kvrelay.engine.attention.native.products import TiledWeight
from kvrelay.engine.model.decoder_weights import DecoderWeights, RmsNorm
from kvrelay.engine.model.packed_linear import Linear


@dataclass(frozen=True, slots=True)
class CompiledDecoder:
    """A decoder whose steps are those of ``NativeBackend``, and whose products are ours.

    ``decoder`` has addresses in ``weights``. Elements of a row of the step's memory: ``joint``
    before the attention and the activation, ``wide`` behind them.
    """

    weights: DecoderWeights
    decoder: forward.ForwardDecoder
    function: forward.ForwardFunction
    joint: int
    wide: int

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """See ``CausalModel``."""
        assert isinstance(step, NativeStep)
        weights, count, kept = self.weights, step.rows, rows.shape[0]
        if step.last_position >= weights.angles.shape[0]:
            raise IndexError(f"position {step.last_position} of {weights.angles.shape[0]}")
        if positions.shape[1] != count or kept > count:  # other memory would be read
            raise ValueError(f"{count} rows, {positions.shape[1]} positions, {kept} rows to keep")
        dtype, size = step.dtype, weights.embedding.shape[1]
        hidden = torch.index_select(weights.embedding, 0, tokens[0])
        others = torch.empty((2, count, size), dtype=dtype)
        joint = torch.empty((count, self.joint), dtype=dtype)
        wide = torch.empty((count, self.wide), dtype=dtype)
        logits = torch.empty((kept, self.decoder.head.columns), dtype=dtype)
        memory = (hidden, others[0], others[1], joint, wide, logits)
        call = forward.ForwardStep(
            *(ctypes.addressof(step.arguments), positions.data_ptr(), rows.data_ptr()),
            *(count, kept),
            *(each.data_ptr() for each in memory),
        )
        if self.function(self.decoder, call):
            raise MemoryError(f"no memory for a forward pass of {count} rows")
        return logits


def compiled_decoder(weights: DecoderWeights, backend: NativeBackend) -> CompiledDecoder | None:
    """The forward pass over the backend's pool; ``None`` if oneDNN multiplies.

    ``ValueError`` if sizes or dtypes do not fit each other.
    """
    head, heads, dtype = weights.head, weights.heads, backend.pool.tensor.dtype
    if not isinstance(head, TiledWeight) or dtype not in KINDS:
        return None
    size = weights.embedding.shape[1]
    joint, attended = (heads.queries + 2 * heads.keys) * heads.width, heads.queries * heads.width
    turning = (heads.queries + heads.keys, heads.width)
    layers = (forward.ForwardLayer * len(weights.layers))()
    between = 0
    for layer, each in zip(layers, weights.layers, strict=True):
        layer.before_attention = _norm(each.before_attention, (size,), dtype)
        layer.before_mlp = _norm(each.before_mlp, (size,), dtype)
        if each.heads_norm is not None:
            layer.heads = _norm(each.heads_norm, turning, dtype)
        layer.qkv = _weight(each.qkv, size, joint)
        layer.out = _weight(each.out, attended, size)
        layer.gate_up = _weight(each.gate_up, size, None)
        layer.down = _weight(each.down, layer.gate_up.columns // 2, size)
        between = max(between, layer.gate_up.columns)
    fits = weights.angles.shape[1:] == (2, heads.width // 2) and weights.angles.is_contiguous()
    if not fits or not dtype is weights.angles.dtype is weights.embedding.dtype:
        raise ValueError(f"angles {tuple(weights.angles.shape)} of {weights.angles.dtype}")
    decoder = forward.ForwardDecoder(
        forward.kernels_of(backend.kernel, head.products),
        layers,
        len(layers),
        _norm(weights.norm, (size,), dtype),
        _weight(head, size, None),
        weights.angles.data_ptr(),
        *(size, heads.queries, heads.keys, heads.width, KINDS[dtype]),
        heads.scaling,
    )
    function = forward.forward_function(open_object(PLAIN))
    rooms = (max(joint, between), max(attended, between // 2))
    return CompiledDecoder(weights, decoder, function, *rooms)


def _norm(norm: RmsNorm, shape: tuple[int, ...], dtype: torch.dtype) -> forward.ForwardNorm:
    weight = norm.weight
    if weight.shape != shape or weight.dtype is not dtype or not weight.is_contiguous():
        raise ValueError(f"a norm of {tuple(weight.shape)} {weight.dtype}, not {shape} {dtype}")
    return forward.ForwardNorm(weight.data_ptr(), norm.epsilon)


def _weight(layer: Linear, numbers: int, columns: int | None) -> forward.ForwardWeight:
    if not isinstance(layer, TiledWeight):
        raise ValueError(f"a layer whose weight is not packed as the others are: {layer}")
    sizes = (layer.in_features, layer.out_features)
    if sizes != (numbers, layer.out_features if columns is None else columns):
        raise ValueError(f"a weight of {sizes[1]} outputs and {sizes[0]} inputs")
    bias = None if layer.bias is None else layer.bias.data_ptr()
    return forward.ForwardWeight(
        layer.packed.data_ptr(), bias, layer.out_features, layer.in_features
    )
