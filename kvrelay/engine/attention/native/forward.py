"""The structures and functions of forward.h: a whole forward pass in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.engine.attention.native.library import NativeKernel
from kvrelay.engine.attention.native.products import Products

_NUMBER = ctypes.c_int64
_AT = ctypes.c_void_p
_REAL = ctypes.c_double


class ForwardNorm(ctypes.Structure):
    """Its weight's address, or ``None``."""

    _fields_ = (("weight", _AT), ("epsilon", _REAL))


class ForwardWeight(ctypes.Structure):
    """A packed weight of ``columns`` outputs, each a sum over ``numbers``; a bias or ``None``."""

    _fields_ = (("packed", _AT), ("bias", _AT), ("columns", _NUMBER), ("numbers", _NUMBER))


class ForwardLayer(ctypes.Structure):
    """One decoder layer."""

    _fields_ = (
        *((name, ForwardNorm) for name in ("before_attention", "heads", "before_mlp")),
        *((name, ForwardWeight) for name in ("qkv", "out", "gate_up", "down")),
    )


class ForwardKernels(ctypes.Structure):
    """Addresses of what a forward pass calls."""

    _fields_ = tuple(
        (name, _AT) for name in ("norm", "rotate", "gate", "attention", "product", "parallel")
    )


class ForwardDecoder(ctypes.Structure):
    """All that does not change between steps."""

    _fields_ = (
        ("kernels", ForwardKernels),
        ("layers", ctypes.POINTER(ForwardLayer)),
        ("count", _NUMBER),
        ("norm", ForwardNorm),
        ("head", ForwardWeight),
        *((name, _AT) for name in ("embedding", "angles")),
        *((name, _NUMBER) for name in ("vocab", "size", "queries", "kv_heads", "width", "kind")),
        ("scale", _REAL),
    )


class ForwardStep(ctypes.Structure):
    """The rows of a step and the memory of its forward pass."""

    _fields_ = (
        *((name, _AT) for name in ("attention", "tokens", "positions", "kept_rows")),
        *((name, _NUMBER) for name in ("rows", "kept")),
        *((name, _AT) for name in ("room", "logits")),
    )


def kernels_of(kernel: NativeKernel, products: Products) -> ForwardKernels:
    """The addresses of compiled kernels."""
    rows = kernel.rows
    functions = (rows.norm, rows.rotate, rows.gate, kernel.function, products.function)
    return ForwardKernels(*(_address(function) for function in functions), kernel.parallel)


@dataclass(frozen=True, slots=True)
class ForwardFunctions:
    """``forward`` returns 1 if there is no memory, 2 for a token beyond the embedding, else 0.

    ``room`` are the bytes of memory that it needs for each row.
    """

    forward: Callable[[ForwardDecoder, ForwardStep], int]
    room: Callable[[ForwardDecoder], int]


def forward_functions(loaded: ctypes.CDLL) -> ForwardFunctions:
    """Those of a loaded object."""
    model, step = ctypes.POINTER(ForwardDecoder), ctypes.POINTER(ForwardStep)
    loaded.kvrelay_forward.argtypes = [model, step]
    loaded.kvrelay_forward_room.argtypes = [model]
    loaded.kvrelay_forward_room.restype = ctypes.c_int64
    return ForwardFunctions(loaded.kvrelay_forward, loaded.kvrelay_forward_room)


def _address(function: object) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
