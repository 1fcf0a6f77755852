"""Activations of torch on the CPU, so that an element does not depend on where it stands.

torch computes most elements with vectors and those that remain with the scalar functions of the C
library, whose exponentials are rounded otherwise. Which remain depends on the number of elements
and on how a large tensor is divided among threads. Here every part is a whole number of vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_GRAIN = 32768  # elements of one thread's part at least: internal::GRAIN_SIZE of ATen
_GRAIN_OF_GELU = 16384  # more are divided among all threads
_VECTORS = 64  # elements of two vectors of 512 bits in a dtype of two bytes

_Elementwise = Callable[..., torch.Tensor]
_NAMES = ("sigmoid", "tanh", "exp", "exp2", "expm1", "erf", "rsqrt")
_ACTIVATIONS = frozenset(
    [getattr(owner, name) for owner in (torch, torch.Tensor) for name in _NAMES]
    + [functional.silu, functional.gelu, functional.mish, functional.softplus]
    + [functional.elu, functional.selu, functional.celu, functional.logsigmoid]
    + [torch.special.expit]
)


def vectorised(
    function: _Elementwise, given: torch.Tensor, *others: object, **named: object
) -> torch.Tensor:
    """An elementwise ``function(given, *others, **named)`` of torch, all elements by vectors."""
    if given.device.type != "cpu":
        return function(given, *others, **named)
    count, threads = given.numel(), torch.get_num_threads()
    size = padded(count, threads, function is functional.gelu)
    if size == count and given.is_contiguous():
        return function(given, *others, **named)
    room = torch.empty(size, dtype=given.dtype)
    room[:count].view(given.shape).copy_(given)
    room[count:] = 0
    return function(room, *others, **named)[:count].view(given.shape)


def padded(count: int, threads: int, gelu: bool) -> int:
    """The least size of at least ``count`` elements that threads divide into whole vectors."""
    size = count
    while True:
        if gelu:
            parts = threads if size > _GRAIN_OF_GELU else 1
        else:
            parts = min(threads, max(1, -(-size // _GRAIN)))
        missing = -size % (_VECTORS * parts)
        if not missing:
            return size
        size += missing


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
        return vectorised(function, given, *rest, **others)
