"""Attention in float32 with a product that tensor cores round, compiled: ``.. rounded SM PRODUCT``.

Prints what ``compiled`` does. The interpreter computes such a product without rounding.
"""

from __future__ import annotations

import importlib
import sys

from tests.engine.cuda.mutants import mistaken

PRODUCTS = {
    "scores": ('keys, input_precision="ieee"', 'keys, input_precision="tf32"'),
    "values": ('values, input_precision="ieee"', 'values, input_precision="tf32"'),
}

if __name__ == "__main__":
    architecture, product = sys.argv[1:]
    with mistaken("_attend_segment", *PRODUCTS[product]):
        compiled = importlib.import_module("tests.engine.cuda.compiled")
        compiled.main(int(architecture), "float32")
