"""The forward pass of a known model between Triton's kernels: ten launches a layer in decode.

Sums and norms are one kernel, so are a head's norm, its rotation and the KV store, and so is the
gated activation. Every rounding is where ``model.decoder`` has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrelay.engine.attention.backend import AttentionBackend, AttentionStep
from kvrelay.engine.attention.native.backend import NativeBackend
from kvrelay.engine.attention.native.rows import WIDEST
from kvrelay.engine.attention.triton_backend import TritonBackend, TritonStep
from kvrelay.engine.model.compiled_decoder import compiled_decoder
from kvrelay.engine.model.decoder import Decoder
from kvrelay.engine.model.decoder_weights import RmsNorm
from kvrelay.engine.model.forward import CausalModel
from kvrelay.engine.model.native_decoder import NativeDecoder


def forward_for(forward: CausalModel, backend: AttentionBackend) -> CausalModel:
    """The forward pass of a model with this backend: a fused one where both allow it."""
    if isinstance(forward, Decoder):
        if isinstance(backend, TritonBackend):
            return FusedDecoder(forward)
        if isinstance(backend, NativeBackend) and forward.weights.heads.width <= WIDEST:
            compiled = compiled_decoder(forward.weights, backend)
            return compiled or NativeDecoder(forward.weights, backend.rows)
    return forward


@dataclass(frozen=True, slots=True)
class FusedDecoder:
    """A decoder whose steps are those of ``TritonBackend``."""

    decoder: Decoder

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """See ``CausalModel``."""
        from kvrelay.engine.cuda.rows import gated, norm, rotate

        assert isinstance(step, TritonStep)
        weights = self.decoder.weights
        heads = weights.heads
        hidden = weights.embedding[tokens[0]]
        cosines, sines = self.decoder.angles(positions)
        angles = (cosines[:, 0].contiguous(), sines[:, 0].contiguous())
        added: torch.Tensor | None = None
        for number, layer in enumerate(weights.layers):
            joint = layer.qkv(_normed(layer.before_attention, added, hidden))
            query = rotate(
                joint,
                heads.queries,
                step.pool,
                number,
                step.entries.slots,
                angles,
                None if layer.heads_norm is None else layer.heads_norm.weight,
                0.0 if layer.heads_norm is None else layer.heads_norm.epsilon,
            )
            attended = step.attend_stored(number, query, heads.scaling)
            added = layer.out(attended.view(hidden.shape[0], -1))
            joint = layer.gate_up(_normed(layer.before_mlp, added, hidden))
            added = layer.down(gated(joint))
        assert added is not None
        last = hidden[rows]
        return weights.head(norm(added[rows], last, weights.norm.weight, weights.norm.epsilon))


def _normed(owner: RmsNorm, added: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
    from kvrelay.engine.cuda.rows import norm

    return norm(added, hidden, owner.weight, owner.epsilon)
