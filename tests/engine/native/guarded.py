"""Runs one object on memory whose other pages may not be touched: ``.. guarded FILE``.

A read or a write outside the tables' blocks, the queries or the output ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

from kvrelay.engine.attention.native.library import Function, entry_of
from tests.engine.native.rig import Problem, attend

LIBC = ctypes.CDLL(None, use_errno=True)
NOTHING = 0  # PROT_NONE
READ = 1


def protect(memory: mmap.mmap, first: int, count: int, right: int) -> None:
    """Give pages [first, first + count) this right."""
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    page = mmap.PAGESIZE
    done = LIBC.mprotect(
        ctypes.c_void_p(base + first * page), ctypes.c_size_t(count * page), ctypes.c_int(right)
    )
    assert done == 0, ctypes.get_errno()


def at_the_end(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that ends where a page without a right begins."""
    count = torch.Size(shape).numel()
    pages = -(-count * dtype.itemsize // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    protect(memory, pages, 1, NOTHING)
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
        protect(memory, odd, 1, NOTHING)
    table, first = [2, 0, 3], 0
    if window and window < 13:  # the first block is outside every window
        first, table = 24, [0, 1, 3]
        protect(memory, 0, 1, NOTHING)
        protect(memory, 2, 1, NOTHING)
    rows = 3 * size - first
    query = at_the_end((rows, 2, width), dtype)
    query.copy_(torch.randn(query.shape))
    out = at_the_end((rows, 2, width), dtype)
    problem = Problem(pool, 2, 0.2, window=window)
    attend(function, problem, [(first, rows, table)], query, out=out)
    assert not out.isnan().any()


def main(path: str) -> None:
    """All dtypes, widths with and without a rest, and windows."""
    function = entry_of(ctypes.CDLL(path))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for width in (16, 32, 33, 40, 12, 7):
            for window in (0, 9, 30):
                run(function, dtype, width, window)
    print("nothing else was touched")


if __name__ == "__main__":
    main(sys.argv[1])
