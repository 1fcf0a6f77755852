"""Compares an object of the attention kernel with the plain one, to the bit, in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from kvrelay.engine.attention.native.arguments import KINDS, KernelArguments, arguments_of_pool
from kvrelay.engine.attention.native.products import ProductFunction, Products, tiled
from kvrelay.engine.attention.native.rows import RowFunctions, RowKernels

# A chunk, one beyond a segment of 512 keys, and a decode row; positions before and in the step.
_SPANS = ((0, 9), (510, 3), (77, 1))
_BLOCK = 16
_HEADS = 2
_GROUP = 2
# Rows, columns and numbers of a row: many rows, and every count that is in registers at a time.
_PRODUCTS = (*((rows, 40, 70) for rows in range(1, 13)), (17, 64, 320), (90, 17, 31))
_TINY = 4e-38  # weights times such numbers are below the smallest normal one

Kernel = Callable[[KernelArguments], int]


def differs(function: Kernel, oracle: Kernel) -> str | None:
    """What is not the same to the bit, or ``None``."""
    for dtype in KINDS:
        for width, size in ((48, 1.0), (20, _TINY)):
            if _out(function, dtype, width, size) != _out(oracle, dtype, width, size):
                kind = str(dtype).removeprefix("torch.")
                return f"not the bits of the plain kernel ({kind}, heads of {width})"
    return None


def rows_differ(functions: RowFunctions, oracle: RowFunctions) -> str | None:
    """What the row kernels have not the same to the bit, or ``None``."""
    for dtype in KINDS:
        for size in (1.0, _TINY):
            found, wanted = (
                _rows(RowKernels(each, 0), dtype, size) for each in (functions, oracle)
            )
            for name, got in found.items():
                if got != wanted[name]:
                    kind = str(dtype).removeprefix("torch.")
                    return f"not the bits of the plain kernel ({name}, {kind})"
    return None


def products_differ(products: Products, oracle: ProductFunction) -> str | None:
    """How the products differ from others in a bit, in words; ``None`` if they do not."""
    for rows, columns, size in _PRODUCTS:
        for large in (1.0, _TINY):
            x = _numbers((rows, size), 3.0).to(products.dtype)
            weight = _numbers((columns, size), large).to(products.dtype)
            bias = _numbers((columns,), large).to(products.dtype)
            made = [
                tiled(each, weight, bias)(x).view(torch.uint8)
                for each in (replace(products, parallel=0), replace(products, function=oracle))
            ]
            if not torch.equal(*made):
                return f"not the bits of the plain kernel (products of {size} numbers)"
    return None


def _rows(kernels: RowKernels, dtype: torch.dtype, size: float) -> dict[str, bytes]:
    """What every row kernel makes of such numbers; no size is a multiple of 16."""
    width, heads, rows = 44, 3, 3
    added, residual = (_numbers((rows, 100), n * size).to(dtype) for n in (0.7, 3.0))
    weight = _numbers((100,), 2.0).to(dtype)
    joint = _numbers((rows, heads * width), 9.0 * size).to(dtype)
    turning = joint.clone()
    angles = _numbers((5, 2, width // 2), 1.0).to(dtype)
    norm_weight = _numbers((2, width), 2.0).to(dtype)
    positions = torch.tensor([[4, 0, 2]])
    made = {
        "norm": kernels.norm(added, residual, weight, 1e-6),
        "sum": residual,
        "gate": kernels.gate(joint),
        "rotation": turning,
    }
    kernels.rotate(turning, angles, positions, 2, norm_weight, 1e-6)
    return {name: each.view(torch.uint8).numpy().tobytes() for name, each in made.items()}


def _out(function: Kernel, dtype: torch.dtype, width: int, size: float) -> bytes:
    """The output of the function on numbers that depend on nothing but the arguments."""
    need = [-(-(start + count) // _BLOCK) for start, count in _SPANS]
    rows = sum(count for _, count in _SPANS)
    pool = _numbers((sum(need), 1, 2, _BLOCK, _HEADS, width), size).to(dtype)
    query = _numbers((rows, _HEADS * _GROUP, width), 3.0).to(dtype)
    counts = np.array([count for _, count in _SPANS])
    entries = np.empty((len(_SPANS), 4), np.int64)
    entries[:, 0] = np.cumsum(counts) - counts
    entries[:, 1:3] = _SPANS
    entries[:, 3] = np.cumsum(need) - need
    tables = np.arange(sum(need), dtype=np.int32)[::-1].copy()
    out = torch.empty_like(query)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    a = arguments_of_pool(pool)
    a.entries = entries.ctypes.data
    a.tables = tables.ctypes.data
    a.n = len(_SPANS)
    a.group = _GROUP
    a.query = query.data_ptr()
    a.out = out.data_ptr()
    a.sinks = sinks.data_ptr()
    a.q_row = query.stride(0)
    a.q_head = query.stride(1)
    a.o_row = out.stride(0)
    a.o_head = out.stride(1)
    a.window = 600
    a.scale = width**-0.5
    a.softcap = 20.0
    if function(a) != 0:
        raise MemoryError("self-test of the attention kernel")
    return out.view(torch.uint8).numpy().tobytes()


def _numbers(shape: tuple[int, ...], size: float) -> torch.Tensor:
    """Numbers in (-size, size), by a sequence of low discrepancy."""
    count = int(np.prod(shape))
    steps = np.modf(np.arange(1, count + 1) * 0.6180339887498949)[0] * 2 - 1
    return torch.from_numpy((steps * size).astype(np.float32)).view(shape)
