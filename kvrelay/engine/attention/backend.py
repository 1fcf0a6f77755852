"""Attention over paged KV: the backend's interface and the plug-in for `transformers`.

Every model runs with ``ATTENTION`` as its attention implementation. The current step is an argument
of the forward pass, so nothing here is global and several workers can share a process. The import
of `transformers` takes seconds: this module leaves it, and the registration, to ``loading``.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kvrelay.engine.attention.batch import Batch, ModelInputs
from kvrelay.errors import Unservable

ATTENTION = "kvrelay_paged"


class AttentionStep(Protocol):
    """Attention of one step, with all indices built; called once for each layer."""

    @property
    def inputs(self) -> ModelInputs:
        """What the forward pass of the step reads."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """Store K and V [T, kv heads, head dim], attend Q [T, heads, head dim], in packed order.

        Returns a contiguous [T, heads, head dim]; ``scaling`` ``None`` is 1 / sqrt(head dim).
        """


class AttentionBackend(Protocol):
    """An implementation of attention over one pool, chosen at start."""

    @property
    def name(self) -> str:
        """The name in logs and tables."""

    @property
    def profile(self) -> str:
        """The name in the numeric profile: with all that decides the bits of its results."""

    def step(self, batch: Batch) -> AttentionStep:
        """Build every index that the batch needs in any layer."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    kvrelay_step: AttentionStep | None = None,
    **unused: object,
) -> tuple[torch.Tensor, None]:
    """The attention function of `transformers`; the probe has checked ``unused`` at start."""
    if kvrelay_step is None:
        raise Unservable("the model does not pass its keyword arguments on to the attention")
    layer: int = module.layer_idx  # type: ignore[assignment]
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return kvrelay_step.attend(layer, queries, keys, values, scaling)[None], None
