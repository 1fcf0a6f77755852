"""Our forward pass of Llama, Mistral, Qwen2 and Qwen3: fewer and larger operations.

Q and K are normed and rotated together. Every rounding is where `transformers` has it, so bfloat16
agrees too. The probe compares it with the model's own forward at start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from kvrelay.engine.attention.backend import AttentionStep
from kvrelay.engine.model.decoder_weights import DecoderLayer, DecoderWeights
from kvrelay.engine.model.elementwise import vectorised


@dataclass(frozen=True, slots=True)
class Decoder:
    """The forward pass of a known model."""

    weights: DecoderWeights

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        hidden = self.weights.embedding[tokens[0]]
        cos, sin = self.angles(positions)
        for number, layer in enumerate(self.weights.layers):
            attended = self._attend(layer, number, layer.before_attention(hidden), cos, sin, step)
            hidden = layer.out(attended).add_(hidden)
            gate, up = layer.gate_up(layer.before_mlp(hidden)).chunk(2, -1)
            hidden = layer.down(vectorised(silu, gate).mul_(up)).add_(hidden)
        return self.weights.head(self.weights.norm(hidden[rows]))

    def _attend(
        self,
        layer: DecoderLayer,
        number: int,
        rows: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: AttentionStep,
    ) -> torch.Tensor:
        """[T, hidden] to [T, query heads * width]."""
        cut = self.weights.heads
        joint = layer.qkv(rows).view(rows.shape[0], -1, cut.width)
        turning = joint[:, : cut.queries + cut.keys]
        if layer.heads_norm is not None:
            turning = layer.heads_norm(turning)
        turned = (turning * cos).add_(turning.roll(cut.width // 2, -1).mul_(sin))
        query, key = turned[:, : cut.queries], turned[:, cut.queries :]
        value = joint[:, cut.queries + cut.keys :]
        return step.attend(number, query, key, value, cut.scaling).view(rows.shape[0], -1)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, 1, width]; the first half of the sines carries the minus sign.

        Rotating is ``x * cos + (-second half, first half) * sin``: with the sign in the sine, the
        halves only swap.
        """
        cos, sin = self.weights.angles[positions[0]].unbind(1)
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
