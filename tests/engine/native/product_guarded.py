"""Runs the products of one object on memory that ends where a page may not be touched."""

from __future__ import annotations

import ctypes
import sys

import torch

from kvrelay.engine.attention.native.library import tiles_refused
from kvrelay.engine.attention.native.products import pack, product_function
from tests.engine.native.guarded import at_the_end


def main(path: str) -> None:
    """Sizes with and without rests; operands and results end where the page begins."""
    tiles_refused()  # or not: an object with AMX may use them from now on
    function = product_function(ctypes.CDLL(path))
    for rows in (1, 2, 3, 4, 16, 17, 33, 600):
        for columns, size in ((7, 3), (16, 32), (33, 33), (40, 300), (64, 64)):
            weight = pack(torch.randn(columns, size).bfloat16())
            shapes = ((rows, size), (columns,), (rows, columns), tuple(weight.shape))
            x, bias, out, packed = (at_the_end(shape, torch.bfloat16) for shape in shapes)
            x.copy_(torch.randn(x.shape))
            bias.copy_(torch.randn(bias.shape))
            packed.copy_(weight)
            out.fill_(torch.nan)
            operands = (x, packed, bias, out)
            function(*(each.data_ptr() for each in operands), rows, columns, size, 1, None)
            assert not out.isnan().any()
    print("nothing else was touched")


if __name__ == "__main__":
    main(sys.argv[1])
