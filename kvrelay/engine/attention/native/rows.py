"""Calls of the row kernels: norms, rotations and gated activations of all rows of a step.

rows.h has the operations. A tensor is [rows, size] and contiguous; the numbers are of one dtype.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvrelay.engine.attention.index import rows_computed
from kvrelay.engine.attention.native.arguments import KINDS

WIDEST = 1024
"""Elements of a head that can be rotated, as in rows.h."""

_NUMBER = ctypes.c_int64
_AT = ctypes.c_void_p
_REAL = ctypes.c_double
_NORM = (_AT, _AT, _AT, _AT, _NUMBER, _NUMBER, _NUMBER, _REAL, _NUMBER, _AT)
_ROTATE = (_AT, _AT, _AT, _AT, *(_NUMBER,) * 5, _REAL, _NUMBER, _AT)
_GATE = (_AT, _AT, _NUMBER, _NUMBER, _NUMBER, _NUMBER, _AT)


@dataclass(frozen=True, slots=True)
class RowFunctions:
    """The row kernels of one object; their arguments are those of rows.h."""

    norm: Callable[..., int]
    rotate: Callable[..., int]
    gate: Callable[..., int]


def row_functions(library: ctypes.CDLL) -> RowFunctions:
    """The row kernels of a loaded object."""
    found = (library.kvrelay_norm, library.kvrelay_rotate, library.kvrelay_gate)
    for function, kinds in zip(found, (_NORM, _ROTATE, _GATE), strict=True):
        function.restype = ctypes.c_int
        function.argtypes = list(kinds)
    return RowFunctions(*found)


@dataclass(frozen=True, slots=True)
class RowKernels:
    """The row kernels on the threads of torch; ``parallel`` is that of ``NativeKernel``.

    ``pads``: matrix products compute more than a few rows, so behind these are rows of zeros.
    """

    functions: RowFunctions
    parallel: int
    pads: bool = True

    def room(self, rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for rows that a matrix product reads."""
        computed = rows_computed(rows) if self.pads else rows
        make = torch.empty if computed == rows else torch.zeros
        return make((computed, size), dtype=dtype)

    def norm(
        self,
        added: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
    ) -> torch.Tensor:
        """The norm of ``residual`` after ``added``, if any, is added to it in place.

        ``added`` may have more rows, which are left out.
        """
        rows, size = residual.shape
        kind = KINDS[residual.dtype]
        fits = weight.dtype is residual.dtype and weight.shape == (size,)
        if added is not None:
            fits &= added.dtype is residual.dtype and added.shape[1] == size
            fits &= added.is_contiguous() and added.shape[0] >= rows
        _check(fits and weight.is_contiguous() and residual.is_contiguous(), residual, weight)
        out = self.room(rows, size, residual.dtype)
        self.functions.norm(
            None if added is None else added.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            kind,
            epsilon,
            torch.get_num_threads(),
            self.parallel,
        )
        return out

    def rotate(
        self,
        joint: torch.Tensor,
        angles: torch.Tensor,
        positions: torch.Tensor,
        heads: int,
        weight: torch.Tensor | None,
        epsilon: float,
    ) -> None:
        """Rotate the first ``heads`` heads of each row in place, after a norm of each head.

        ``angles`` [positions, 2, width / 2] are cosines and sines, ``positions`` [1, rows] the
        rows of it, ``weight`` [heads, width] that of the norm, if there is one.
        """
        width = 2 * angles.shape[2]
        rows = positions.shape[1]
        fits = joint.is_contiguous() and angles.is_contiguous() and positions.is_contiguous()
        fits &= joint.shape[0] >= rows and joint.shape[1] >= heads * width
        fits &= joint.dtype is angles.dtype and width <= WIDEST
        if weight is not None:
            fits &= weight.is_contiguous() and weight.shape == (heads, width)
            fits &= weight.dtype is joint.dtype
        _check(fits, joint, angles)
        self.functions.rotate(
            joint.data_ptr(),
            angles.data_ptr(),
            positions.data_ptr(),
            None if weight is None else weight.data_ptr(),
            rows,
            joint.shape[1],
            heads,
            width,
            KINDS[joint.dtype],
            epsilon,
            torch.get_num_threads(),
            self.parallel,
        )

    def gate(self, joint: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of [rows, 2 * size], side by side."""
        rows, double = joint.shape
        _check(joint.is_contiguous() and double % 2 == 0, joint)
        out = self.room(rows, double // 2, joint.dtype)
        self.functions.gate(
            joint.data_ptr(),
            out.data_ptr(),
            rows,
            double // 2,
            KINDS[joint.dtype],
            torch.get_num_threads(),
            self.parallel,
        )
        return out


def _check(fits: bool, *given: torch.Tensor) -> None:
    if not fits:  # the kernel would read or write elsewhere
        shapes = [(tuple(one.shape), one.dtype) for one in given]
        raise ValueError(f"no rows that fit each other: {shapes}")
