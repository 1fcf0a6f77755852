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

    ``decoder`` has addresses in ``weights``; ``room`` are bytes of memory for each row of a step.
    """

    weights: DecoderWeights
    decoder: forward.ForwardDecoder
    functions: forward.ForwardFunctions
    room: int

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """See ``CausalModel``."""
        assert isinstance(step, NativeStep)
        positions_served, count, kept = self.weights.angles.shape[0], step.rows, rows.shape[0]
        if step.last_position >= positions_served:
            raise IndexError(f"position {step.last_position} of {positions_served}")
        if not tokens.shape == positions.shape == (1, count) or kept > count:
            sizes = (tuple(tokens.shape), tuple(positions.shape), kept)
            raise ValueError(f"{count} rows, but tokens, positions and rows to keep are {sizes}")
        room = torch.empty(count * self.room, dtype=torch.uint8)
        logits = torch.empty((kept, self.decoder.head.columns), dtype=step.dtype)
        call = forward.ForwardStep(
            ctypes.addressof(step.arguments),
            *(tokens.data_ptr(), positions.data_ptr(), rows.data_ptr()),
            *(count, kept, room.data_ptr(), logits.data_ptr()),
        )
        failed = self.functions.forward(self.decoder, call)
        if failed == 1:
            raise MemoryError(f"no memory for a forward pass of {count} rows")
        if failed:
            raise IndexError(f"a token is not one of {self.decoder.vocab}")
        return logits


def compiled_decoder(weights: DecoderWeights, backend: NativeBackend) -> CompiledDecoder | None:
    """The forward pass over the backend's pool; ``None`` if oneDNN multiplies.

    ``ValueError`` if sizes or dtypes do not fit each other.
    """
    head, heads, dtype = weights.head, weights.heads, backend.pool.tensor.dtype
    if not isinstance(head, TiledWeight):
        return None
    vocab, size = weights.embedding.shape
    joint, attended = (heads.queries + 2 * heads.keys) * heads.width, heads.queries * heads.width
    turning = (heads.queries + heads.keys, heads.width)
    layers = (forward.ForwardLayer * len(weights.layers))()
    for layer, each in zip(layers, weights.layers, strict=True):
        layer.before_attention = _norm(each.before_attention, (size,), dtype)
        layer.before_mlp = _norm(each.before_mlp, (size,), dtype)
        if each.heads_norm is not None:
            layer.heads = _norm(each.heads_norm, turning, dtype)
        layer.qkv = _weight(each.qkv, dtype, size, joint)
        layer.out = _weight(each.out, dtype, attended, size)
        layer.gate_up = _weight(each.gate_up, dtype, size)
        layer.down = _weight(each.down, dtype, layer.gate_up.columns // 2, size)
    decoder = forward.ForwardDecoder(
        forward.kernels_of(backend.kernel, head.products),
        layers,
        len(layers),
        _norm(weights.norm, (size,), dtype),
        _weight(head, dtype, size),
        _address(weights.embedding, (vocab, size), dtype),
        _address(weights.angles, (len(weights.angles), 2, heads.width // 2), dtype),
        *(vocab, size, heads.queries, heads.keys, heads.width, KINDS[dtype]),
        heads.scaling,
    )
    functions = forward.forward_functions(open_object(PLAIN))
    return CompiledDecoder(weights, decoder, functions, functions.room(decoder))


def _norm(norm: RmsNorm, shape: tuple[int, ...], dtype: torch.dtype) -> forward.ForwardNorm:
    return forward.ForwardNorm(_address(norm.weight, shape, dtype), norm.epsilon)


def _weight(
    layer: Linear, dtype: torch.dtype, numbers: int, columns: int | None = None
) -> forward.ForwardWeight:
    if not isinstance(layer, TiledWeight) or layer.products.dtype is not dtype:
        raise ValueError(f"a layer whose weight is not packed as the others are: {layer}")
    sizes = (layer.in_features, layer.out_features)
    if sizes != (numbers, layer.out_features if columns is None else columns):
        raise ValueError(f"a weight of {sizes[1]} outputs and {sizes[0]} inputs")
    bias = None if layer.bias is None else layer.bias.data_ptr()
    return forward.ForwardWeight(layer.packed.data_ptr(), bias, *reversed(sizes))


def _address(numbers: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Of numbers that compiled code reads."""
    if numbers.shape != shape or numbers.dtype is not dtype or not numbers.is_contiguous():
        found = f"{tuple(numbers.shape)} {numbers.dtype}"
        raise ValueError(f"weights are {found}, not {shape} {dtype}")
    return numbers.data_ptr()
