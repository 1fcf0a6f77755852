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

_NO_MEMORY = 1  # what the compiled code returns, as in forward.h
_BEYOND_THE_MODEL = 2


@dataclass(frozen=True, slots=True)
class CompiledDecoder:
    """A decoder whose steps are those of ``NativeBackend``, and whose products are ours.

    ``decoder`` has addresses in ``weights``. A step needs ``room`` bytes of memory for each row.
    """

    weights: DecoderWeights
    decoder: forward.ForwardDecoder
    function: forward.ForwardFunction
    room: int

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """See ``CausalModel``; tokens, positions and rows are int64."""
        assert isinstance(step, NativeStep)
        count, kept = step.rows, rows.shape[0]
        self._check(step, tokens, positions, rows)
        room = torch.empty(count * self.room, dtype=torch.uint8)
        logits = torch.empty((kept, self.decoder.head.outputs), dtype=step.dtype)
        call = forward.ForwardStep(
            ctypes.addressof(step.arguments),
            *(tokens.data_ptr(), positions.data_ptr(), rows.data_ptr()),
            *(count, kept, room.data_ptr(), logits.data_ptr()),
            None if step.shared is None else ctypes.addressof(step.shared),
        )
        failed = self.function(self.decoder, call)
        if failed == _NO_MEMORY:
            raise MemoryError(f"no memory for a forward pass of {count} rows")
        if failed == _BEYOND_THE_MODEL:
            vocab, served = self.decoder.vocab, self.decoder.positions
            raise IndexError(f"tokens must be below {vocab}, and positions below {served}")
        if failed:
            raise IndexError(f"rows to keep must ascend and be below {count}: {rows.tolist()}")
        return logits

    def _check(
        self, step: NativeStep, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """``ValueError`` if compiled code would read or write other memory."""
        weights = self.weights
        heads = weights.heads
        found = (step.layers, step.heads, step.width, step.dtype)
        if found != (len(weights.layers), heads.keys, heads.width, weights.embedding.dtype):
            raise ValueError(f"a step over another pool: layers, heads, width and dtype {found}")
        if not tokens.shape == positions.shape == (1, step.rows):
            sizes = f"{tuple(tokens.shape)} tokens and {tuple(positions.shape)} positions"
            raise ValueError(f"{sizes} for a step of {step.rows} rows")
        numbers = (tokens, positions, rows)
        if any(one.dtype is not torch.int64 or not one.is_contiguous() for one in numbers):
            raise ValueError("tokens, positions and rows to keep must be contiguous and int64")


def compiled_decoder(weights: DecoderWeights, backend: NativeBackend) -> CompiledDecoder | None:
    """The forward pass over the backend's pool; ``None`` if oneDNN multiplies.

    ``ValueError`` if sizes or dtypes of the weights do not fit each other.
    """
    head, heads, dtype = weights.head, weights.heads, weights.embedding.dtype
    if not isinstance(head, TiledWeight):
        return None
    if not weights.layers or heads.queries % heads.keys or heads.width % 2 or heads.scaling <= 0:
        raise ValueError(f"{len(weights.layers)} layers of {heads}")
    vocab, size = weights.embedding.shape
    attended = heads.queries * heads.width
    joint = attended + 2 * heads.keys * heads.width
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
        layer.down = _weight(each.down, dtype, layer.gate_up.outputs / 2, size)
    decoder = forward.ForwardDecoder(
        forward.kernels_of(backend.kernel, head.products),
        layers,
        len(layers),
        _norm(weights.norm, (size,), dtype),
        _weight(head, dtype, size),
        _address(weights.embedding, (vocab, size), dtype),
        _address(weights.angles, (len(weights.angles), 2, heads.width // 2), dtype),
        *(vocab, len(weights.angles), size),
        *(heads.queries, heads.keys, heads.width, KINDS[dtype]),
        heads.scaling,
    )
    loaded = open_object(PLAIN)
    room = forward.bytes_a_row(loaded, decoder)
    return CompiledDecoder(weights, decoder, forward.forward_function(loaded), room)


def _norm(norm: RmsNorm, shape: tuple[int, ...], dtype: torch.dtype) -> forward.ForwardNorm:
    return forward.ForwardNorm(_address(norm.weight, shape, dtype), norm.epsilon)


def _weight(
    layer: Linear, dtype: torch.dtype, inputs: float, outputs: int | None = None
) -> forward.ForwardWeight:
    if not isinstance(layer, TiledWeight) or layer.products.dtype is not dtype:
        raise ValueError(f"a weight that is not packed in {dtype} as that of the head is")
    found = (layer.in_features, layer.out_features)
    if found != (inputs, layer.out_features if outputs is None else outputs):
        raise ValueError(f"a weight of {found} inputs and outputs, not {(inputs, outputs)}")
    bias = None if layer.bias is None else layer.bias.data_ptr()
    return forward.ForwardWeight(layer.packed.data_ptr(), bias, *reversed(found))


def _address(numbers: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Of numbers that compiled code reads."""
    if numbers.shape != shape or numbers.dtype is not dtype or not numbers.is_contiguous():
        found = f"{tuple(numbers.shape)} {numbers.dtype}"
        raise ValueError(f"weights are {found}, not {shape} {dtype}")
    return numbers.data_ptr()
