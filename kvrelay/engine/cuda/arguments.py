"""What the kernels take: named tuples, which Triton passes by their fields.

Numbers are strides in elements. A kernel multiplies them with 64-bit places, so pools of more than
2 ** 31 elements are no exception.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

SEGMENT = 512
"""Keys that are summed before they are merged with those before: a part of every row's bits."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """``window`` 0 is none, ``softcap`` 0 is none; ``sinks`` [heads] are scores without values."""

    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


PLAIN = AttentionOptions()
"""No window, no soft cap and no sinks."""


class Rows(NamedTuple):
    """A tensor [rows, heads, head dim] of any strides but the last, 1."""

    tensor: torch.Tensor
    s_row: int
    s_head: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Rows:
        """The tensor with its strides."""
        return cls(tensor, tensor.stride(0), tensor.stride(1))


class LayerPool(NamedTuple):
    """One layer of a pool, which begins ``offset`` elements behind the pool."""

    tensor: torch.Tensor
    offset: int
    s_block: int
    s_kv: int
    s_pos: int
    s_head: int


class Contexts(NamedTuple):
    """The entries of a step: their spans [entries, 4] and joined block tables."""

    spans: torch.Tensor
    blocks: torch.Tensor


class Scoring(NamedTuple):
    """How a score is made of a product; ``window`` and ``softcap`` are read if there are any."""

    scale: float
    window: int
    softcap: float


class TileShape(NamedTuple):
    """Constants of attention.

    ``GROUP`` query heads share a kv head; a program has ``ROWS`` rows of Q and reads ``KEYS`` keys
    at a time, ``SEGMENT`` keys before it merges.
    """

    GROUP: int
    ROWS: int
    KEYS: int
    SEGMENT: int
    BLOCK: int
    DIM: int
    WIDTH: int
    WINDOWED: bool
    CAPPED: bool
    SINKS: bool
