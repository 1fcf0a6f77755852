"""The structures and functions of forward.h: a whole forward pass in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from kvrelay.engine.attention.native.library import NativeKernel
from kvrelay.engine.attention.native.products import Products

_NUMBER = ctypes.c_int64
_AT = ctypes.c_void_p
_REAL = ctypes.c_double

ForwardFunction = Callable[["ForwardDecoder", "ForwardStep"], int]
"""``kvrelay_forward``; forward.h has what it returns."""


class ForwardNorm(ctypes.Structure):
    """A norm; without the address of a weight there is none."""

    _fields_ = (("weight", _AT), ("epsilon", _REAL))


class ForwardWeight(ctypes.Structure):
    """The address of a packed weight, and that of a bias if there is one."""

    _fields_ = (("packed", _AT), ("bias", _AT), ("outputs", _NUMBER), ("inputs", _NUMBER))


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
        ("layer_count", _NUMBER),
        ("norm", ForwardNorm),
        ("head", ForwardWeight),
        *((name, _AT) for name in ("embedding", "angles")),
        *((name, _NUMBER) for name in ("vocab", "positions", "size")),
        *((name, _NUMBER) for name in ("queries", "kv_heads", "width", "kind")),
        ("scale", _REAL),
    )


class ForwardStep(ctypes.Structure):
    """The rows of a step and the memory of its forward pass."""

    _fields_ = (
        *((name, _AT) for name in ("attention", "tokens", "positions", "kept_rows")),
        *((name, _NUMBER) for name in ("rows", "kept")),
        *((name, _AT) for name in ("room", "logits", "shared")),
    )


def kernels_of(kernel: NativeKernel, products: Products) -> ForwardKernels:
    """The addresses of compiled kernels."""
    rows = kernel.rows
    functions = (rows.norm, rows.rotate, rows.gate, kernel.function, products.function)
    return ForwardKernels(*(_address(function) for function in functions), kernel.parallel)


def forward_function(loaded: ctypes.CDLL) -> ForwardFunction:
    """The call of a loaded object."""
    function = loaded.kvrelay_forward
    function.restype = ctypes.c_int
    function.argtypes = [ctypes.POINTER(ForwardDecoder), ctypes.POINTER(ForwardStep)]
    called: ForwardFunction = function
    return called


def bytes_a_row(loaded: ctypes.CDLL, decoder: ForwardDecoder) -> int:
    """Bytes of memory that a forward pass needs for each row."""
    function = loaded.kvrelay_forward_room
    function.restype = ctypes.c_int64
    found: int = function(ctypes.byref(decoder))
    return found


def _address(function: object) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
