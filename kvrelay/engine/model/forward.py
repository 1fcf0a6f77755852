"""The only boundary to a `transformers` model: packed tokens in, logits of chosen rows out.

The model's own forward does everything outside attention, logit scaling and caps included. The
head is computed only for the rows that sample (``logits_to_keep``).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Protocol, cast

import torch
from transformers import PreTrainedModel

from kvrelay.engine.attention.backend import AttentionStep
from kvrelay.engine.model.elementwise import Vectorising


class _Output(Protocol):
    logits: torch.Tensor


class _Causal(Protocol):
    """The typed call of a causal model; `transformers` leaves it untyped."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        use_cache: bool = True,
        logits_to_keep: torch.Tensor | int = 0,
        kvrelay_step: object = None,
    ) -> _Output: ...


class CausalModel(Protocol):
    """A model as the runner calls it: `transformers`' own forward, or ours."""

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [R, vocab] of the packed ``rows`` [R], which ascend; tokens, positions [1, T]."""


class TransformersModel:
    """A loaded model in evaluation mode."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._call = cast(_Causal, model)

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        step: object,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """``step`` is passed to the attention function (see ``AttentionStep``)."""
        with Vectorising() if tokens.device.type == "cpu" else nullcontext():
            out = self._call(
                input_ids=tokens,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=rows,
                kvrelay_step=step,
            )
        return out.logits[0]

    def plain_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [vocab] after one unbroken sequence [T], as plain `transformers` computes them."""
        return self._call(input_ids=tokens[None], use_cache=False).logits[0, -1]

    def set_attention(self, name: str) -> None:
        """Use another attention function from now on."""
        self.model.set_attn_implementation(name)
