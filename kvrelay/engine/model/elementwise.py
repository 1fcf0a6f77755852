"""Activations of torch on the CPU, so that an element does not depend on where it stands.

torch computes most elements with vectors and those that remain with the scalar functions of the C
library, whose exponentials are rounded otherwise. Which remain depends on the number of elements
and on how a large tensor is divided among threads. Here every part is a whole number of vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import lcm

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_GRAIN = 32768  # elements of one thread's part at least: internal::GRAIN_SIZE of ATen
_GRAIN_OF_GELU = 16384  # more are divided among all threads
_VECTORS = 64  # elements of two vectors of 512 bits in a dtype of two bytes

_Elementwise = Callable[[torch.Tensor], torch.Tensor]
_NAMES = ("sigmoid", "tanh", "exp", "exp2", "expm1", "erf", "rsqrt")
_ACTIVATIONS = frozenset(
    [getattr(owner, name) for owner in (torch, torch.Tensor) for name in _NAMES]
    + [functional.silu, functional.gelu, functional.mish, functional.softplus]
    + [functional.elu, functional.selu, functional.celu, functional.logsigmoid]
    + [torch.special.expit]
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


class Vectorising(TorchFunctionMode):
    """Computes activations by ``vectorised``, called as modules, functions or methods.

    A call that changes a tensor in place, or that has ``out``, is left as it is.
    """

    def __torch_function__(
        self,
        function: Callable[..., torch.Tensor],
        types: Iterable[type],
        args: tuple[torch.Tensor, ...] = (),
        kwargs: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """``function`` of its arguments; see ``torch.overrides``."""
        others = dict(kwargs or {})
        if function not in _ACTIVATIONS or others.get("inplace") or "out" in others:
            return function(*args, **others)
        given, *rest = args or (others.pop("input"),)
        return vectorised(lambda room: function(room, *rest, **others), given)
