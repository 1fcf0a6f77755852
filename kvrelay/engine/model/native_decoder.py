"""The forward pass of a known model by the compiled kernels of the CPU, called one by one.

It is used where oneDNN multiplies, ``model.compiled_decoder`` where our products do. A layer is
four matrix products, the attention, and four calls on rows: the sum of two streams with its norm
(twice), the rotation with the norm of each head, and the gated activation. Every rounding is where
``model.decoder`` has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrelay.engine.attention.backend import AttentionStep
from kvrelay.engine.attention.native.backend import NativeStep
from kvrelay.engine.attention.native.rows import RowKernels
from kvrelay.engine.model.decoder_weights import DecoderWeights, RmsNorm


@dataclass(frozen=True, slots=True)
class NativeDecoder:
    """A decoder whose steps are those of ``NativeBackend``."""

    weights: DecoderWeights
    kernels: RowKernels

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """See ``CausalModel``."""
        assert isinstance(step, NativeStep)
        weights, kernels = self.weights, self.kernels
        heads = weights.heads
        turning = heads.queries + heads.keys
        last = int(positions.max())
        if last >= weights.angles.shape[0]:
            raise IndexError(f"position {last} of {weights.angles.shape[0]}")
        hidden = weights.embedding[tokens[0]]
        added: torch.Tensor | None = None
        for number, layer in enumerate(weights.layers):
            joint = layer.qkv(self._norm(added, hidden, layer.before_attention))
            norm = layer.heads_norm
            weight, epsilon = (None, 0.0) if norm is None else (norm.weight, norm.epsilon)
            kernels.rotate(joint, weights.angles, positions, turning, weight, epsilon)
            attended = step.attend_joint(number, joint, heads.queries, heads.scaling)
            if layer is weights.layers[-1]:  # nothing reads its other rows
                attended, hidden = self._taken(attended, rows), hidden[rows]
            added = layer.out(attended)
            joint = layer.gate_up(self._norm(added, hidden, layer.before_mlp))
            added = layer.down(kernels.gate(joint))
        assert added is not None
        return weights.head(self._norm(added, hidden, weights.norm))[: rows.shape[0]]

    def _norm(
        self, added: torch.Tensor | None, residual: torch.Tensor, owner: RmsNorm
    ) -> torch.Tensor:
        return self.kernels.norm(added, residual, owner.weight, owner.epsilon)

    def _taken(self, given: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Some rows of a result."""
        count = rows.shape[0]
        out = self.kernels.room(count, given.shape[1], given.dtype)
        torch.index_select(given, 0, rows, out=out[:count])
        return out
