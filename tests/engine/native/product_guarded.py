"""Runs an object's products on memory that ends where a page may not be touched.

``.. product_guarded FILE VARIANT``.
"""

from __future__ import annotations

import ctypes
import sys

import torch

from kvrelay.engine.attention.native.arguments import KINDS
from kvrelay.engine.attention.native.library import tiles_refused
from kvrelay.engine.attention.native.products import ProductFunction, pack, product_function
from tests.engine.native.guarded import at_the_end
from tests.engine.native.product_checks import dtypes_of


def main(path: str, variant: str) -> None:
    """Sizes with and without rests; operands and results end where the page begins."""
    tiles_refused()  # asks the system for tiles, which an object with AMX may use
    function = product_function(ctypes.CDLL(path))
    for dtype in dtypes_of(variant):
        for rows in (1, 2, 3, 4, 16, 17, 33, 600):
            for columns, size in ((7, 3), (16, 32), (33, 33), (40, 300), (64, 64), (2100, 33)):
                multiply(function, dtype, rows, columns, size)
    print("nothing else was touched")


def multiply(
    function: ProductFunction, dtype: torch.dtype, rows: int, columns: int, size: int
) -> None:
    """One product; all of its result is written."""
    weight = pack(torch.randn(columns, size).to(dtype))
    shapes = ((rows, size), (columns,), (rows, columns), tuple(weight.shape))
    x, bias, out, packed = (at_the_end(shape, dtype) for shape in shapes)
    x.copy_(torch.randn(x.shape))
    bias.copy_(torch.randn(bias.shape))
    packed.copy_(weight)
    out.fill_(torch.nan)
    operands = (x.data_ptr(), packed.data_ptr(), bias.data_ptr(), out.data_ptr())
    function(*operands, rows, columns, size, KINDS[dtype], 1, None)
    assert not out.isnan().any()


if __name__ == "__main__":
    main(*sys.argv[1:])
