"""Activations of torch on the CPU, so that an element does not depend on where it stands.

torch computes most elements with vectors and those that remain with the scalar functions of the C
library, whose exponentials are rounded otherwise. Which remain depends on the number of elements
and on how a large tensor is divided among threads. Here every part is a whole number of vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm

import torch
from transformers import activations

_GRAIN = 32768  # elements of one thread's part at least: internal::GRAIN_SIZE of ATen
_GRAIN_OF_GELU = 16384  # more are divided among all threads
_VECTORS = 64  # elements of two vectors of 512 bits in a dtype of two bytes

_Elementwise = Callable[[torch.Tensor], torch.Tensor]
_OF_TORCH = (
    torch.nn.SiLU,
    torch.nn.GELU,
    torch.nn.Sigmoid,
    torch.nn.Tanh,
    torch.nn.Mish,
    torch.nn.Softplus,
)


def vectorised(function: _Elementwise, given: torch.Tensor) -> torch.Tensor:
    """An elementwise function of torch, all elements by vectors, whatever the number of threads."""
    if given.device.type != "cpu":
        return function(given)
    count = given.numel()
    size = _padded(count, torch.get_num_threads())
    if size == count and given.is_contiguous():
        return function(given)
    room = torch.empty(size, dtype=given.dtype)
    room[:count].view(given.shape).copy_(given)
    room[count:] = 0
    return function(room)[:count].view(given.shape)


def _padded(count: int, threads: int) -> int:
    """The least size of at least ``count`` that divides into parts of whole vectors."""
    size = count
    while True:
        parts = min(threads, max(1, -(-size // _GRAIN)))
        unit = _VECTORS * lcm(parts, threads if size > _GRAIN_OF_GELU else 1)
        if size % unit == 0:
            return size
        size += -size % unit


class Vectorised(torch.nn.Module):
    """An activation whose elements do not depend on where they stand."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """See ``vectorised``."""
        return vectorised(self.inner, given)


def vectorise_activations(model: torch.nn.Module) -> int:
    """Wrap every activation of torch and `transformers`; returns how many were wrapped."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__module__ == activations.__name__ or type(child) in _OF_TORCH
    ]
    for parent, name, child in found:
        setattr(parent, name, Vectorised(child))
    return len(found)
