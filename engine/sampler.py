"""Choosing the next token of each row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.work import Sampled, Work


def sample(logits: torch.Tensor, works: Sequence[Work]) -> list[Sampled]:
    """Greedy for now: logits [R, vocab], one work for each row."""
    return [Sampled(token) for token in logits.argmax(-1).tolist()]
