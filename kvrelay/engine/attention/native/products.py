"""Matrix products in bfloat16 on AMX, AVX-512 or AVX2. A row's result depends on itself alone.

products.h defines the arithmetic of an element, which is the same on all three, and the packed
layout of a weight.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

REVISION = 1  # of the arithmetic: increase it with every change of a result's bits
_PANEL = 32
_DEPTH = 32
_SIDE = 16

_NUMBER = ctypes.c_int64
_AT = ctypes.c_void_p
_PRODUCT = (_AT, _AT, _AT, _AT, _NUMBER, _NUMBER, _NUMBER, _NUMBER, _AT)

ProductFunction = Callable[..., int]
"""``kvrelay_product``; its arguments are those of products.h."""


@dataclass(frozen=True, slots=True)
class Products:
    """A variant's compiled product, and ``GOMP_parallel`` of torch's threads (0: one thread)."""

    variant: str
    function: ProductFunction
    parallel: int

    @property
    def profile(self) -> str:
        """The part of the numeric profile that names these products."""
        return f"products-{REVISION}-{self.variant}"


@dataclass(frozen=True, slots=True)
class NoProducts:
    """Why oneDNN multiplies instead.

    ``notable``: log it, since this processor could do better and oneDNN was not asked for.
    """

    reason: str
    notable: bool = True


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """A packed bfloat16 weight with its bias [out features], ready to multiply."""

    products: Products
    packed: torch.Tensor
    bias: torch.Tensor | None
    out_features: int
    in_features: int

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, in features] to [rows, out features]; ``ValueError`` for another dtype or size."""
        count, size = rows.shape
        if rows.dtype is not torch.bfloat16 or size != self.in_features:
            raise ValueError(f"rows of {size} {rows.dtype}: not bfloat16 of {self.in_features}")
        given = rows.contiguous()
        out = torch.empty((count, self.out_features), dtype=torch.bfloat16)
        failed = self.products.function(
            given.data_ptr(),
            self.packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            count,
            self.out_features,
            size,
            torch.get_num_threads(),
            self.products.parallel,
        )
        if failed:
            raise MemoryError(f"no memory for a product of {count} rows of {size}")
        return out


def tiled(products: Products, weight: torch.Tensor, bias: torch.Tensor | None) -> TiledWeight:
    """Pack a bfloat16 weight [out features, in features] on the CPU and its bias [out features].

    ``ValueError`` if one has another dtype, their sizes differ or there are no in features.
    """
    bfloat16 = all(one is None or one.dtype is torch.bfloat16 for one in (weight, bias))
    if not bfloat16 or weight.shape[1] == 0 or (bias is not None and len(bias) != len(weight)):
        raise ValueError(f"no bfloat16 weight and bias: {weight.dtype} {tuple(weight.shape)}")
    if bias is not None:
        bias = bias.detach().contiguous()
    return TiledWeight(products, pack(weight.detach()), bias, *weight.shape)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] to products.h's [panel, block, tile, input pair, output, 2], padded with zeros."""
    columns, numbers = weight.shape
    padding = (0, -numbers % _DEPTH, 0, -columns % _PANEL)
    whole = torch.nn.functional.pad(weight, padding) if any(padding) else weight
    blocks = whole.shape[1] // _DEPTH
    pairs = whole.reshape(-1, _PANEL // _SIDE, _SIDE, blocks, _DEPTH // 2, 2)
    return pairs.permute(0, 3, 1, 4, 2, 5).contiguous()


def product_function(loaded: ctypes.CDLL) -> ProductFunction:
    """The product of a loaded object."""
    function = loaded.kvrelay_product
    function.restype = ctypes.c_int
    function.argtypes = list(_PRODUCT)
    called: ProductFunction = function
    return called
