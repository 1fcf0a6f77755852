"""Runs one object on memory whose other pages may not be touched: ``.. guarded FILE``.

A read or a write outside the tables' blocks, the queries or the output ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

from kvrelay.engine.attention.native.arguments import KINDS
from kvrelay.engine.attention.native.library import Function, entry_of, tiles_refused
from kvrelay.engine.attention.native.rows import RowFunctions, row_functions
from tests.engine.native.rig import Problem, attend

LIBC = ctypes.CDLL(None, use_errno=True)
NO_ACCESS = 0  # PROT_NONE


def protect(memory: mmap.mmap, first: int, count: int) -> None:
    """Forbid any access to pages [first, first + count)."""
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    page = mmap.PAGESIZE
    done = LIBC.mprotect(
        ctypes.c_void_p(base + first * page), ctypes.c_size_t(count * page), ctypes.c_int(NO_ACCESS)
    )
    assert done == 0, ctypes.get_errno()


def at_the_end(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that ends where a page without a right begins."""
    count = torch.Size(shape).numel()
    pages = -(-count * dtype.itemsize // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    protect(memory, pages, 1)
    first = pages * mmap.PAGESIZE // dtype.itemsize - count
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=first * dtype.itemsize).view(
        shape
    )


def run(function: Function, dtype: torch.dtype, width: int, window: int) -> None:
    """Every second block is a page without a right; so is what lies behind the last position."""
    page = mmap.PAGESIZE // dtype.itemsize
    size = 12
    memory = mmap.mmap(-1, 16 * mmap.PAGESIZE)
    flat = torch.frombuffer(memory, dtype=dtype)
    # K and V of a block are pages 4i and 4i + 2, and end where those pages end.
    end = page - size * width
    strides = (4 * page, page, 2 * page, width, width, 1)
    pool = flat[end:].as_strided((4, 1, 2, size, 1, width), strides)
    pool.copy_(torch.randn(pool.shape))
    for odd in range(1, 16, 2):
        protect(memory, odd, 1)
    table, first = [2, 0, 3], 0
    if window and window < 13:  # the first block is outside every window
        first, table = 24, [0, 1, 3]
        protect(memory, 0, 1)
        protect(memory, 2, 1)
    rows = 3 * size - first
    query = at_the_end((rows, 2, width), dtype)
    query.copy_(torch.randn(query.shape))
    out = at_the_end((rows, 2, width), dtype)
    problem = Problem(pool, 2, 0.2, window=window)
    attend(function, problem, [(first, rows, table)], query, out=out)
    assert not out.isnan().any()


def run_rows(functions: RowFunctions, dtype: torch.dtype, width: int) -> None:
    """Operands and results of the row kernels end where a page without a right begins."""
    library = dict.fromkeys(("added", "residual", "out"), (3, width))
    made = {name: at_the_end(shape, dtype) for name, shape in library.items()}
    weight = at_the_end((width,), dtype)
    for each in (made["added"], made["residual"], weight):
        each.copy_(torch.randn(each.shape))
    kind = KINDS[dtype]
    added, residual, out = (made[name].data_ptr() for name in library)
    functions.norm(added, residual, weight.data_ptr(), out, 3, width, kind, 1e-6, 1, 0)
    assert not made["out"].isnan().any()
    gated = at_the_end((3, 2 * width), dtype)
    gated.copy_(torch.randn(gated.shape))
    functions.gate(gated.data_ptr(), out, 3, width, kind, 1, 0)
    if width % 2:
        return
    joint, angles = at_the_end((3, 2 * width), dtype), at_the_end((5, 2, width // 2), dtype)
    weights, positions = at_the_end((2, width), dtype), at_the_end((1, 3), torch.int64)
    for each in (joint, angles, weights):
        each.copy_(torch.randn(each.shape))
    positions.copy_(torch.tensor([[4, 0, 2]]))
    operands = (joint, angles, positions, weights)
    functions.rotate(*(t.data_ptr() for t in operands), 3, 2 * width, 2, width, kind, 1e-6, 1, 0)
    assert not joint.isnan().any()


def main(path: str) -> None:
    """All dtypes, widths with and without a rest, and windows."""
    tiles_refused()  # asks the system for tiles, which an object with AMX may use
    library = ctypes.CDLL(path)
    function, rows = entry_of(library), row_functions(library)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for width in (16, 32, 33, 40, 12, 7):
            run_rows(rows, dtype, width)
            for window in (0, 9, 30):
                run(function, dtype, width, window)
    print("nothing else was touched")


if __name__ == "__main__":
    main(sys.argv[1])
