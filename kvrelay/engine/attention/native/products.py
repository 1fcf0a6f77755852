"""Products of rows with a weight in bfloat16 on AMX tiles, whose bits do not depend on the cut.

products.h says what an element is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvrelay.engine.attention.native.build import PRODUCTS

REVISION = 1  # of the definition of an element: a change of any bit is a new one
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
    """The object that passed its test, on torch's own threads."""

    function: ProductFunction
    parallel: int

    @property
    def profile(self) -> str:
        """What decides the bits of its results, for the numeric profile."""
        return f"products-{REVISION}-{PRODUCTS}"


@dataclass(frozen=True, slots=True)
class NoProducts:
    """oneDNN multiplies instead, for a reason in words for people.

    ``notable``: this processor has AMX, and it was not oneDNN that was asked for.
    """

    reason: str
    notable: bool = True


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """A weight in the order in which its product reads it, and a bias."""

    products: Products
    packed: torch.Tensor
    bias: torch.Tensor | None
    out_features: int
    in_features: int

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, in features] to [rows, out features]."""
        count, size = rows.shape
        if rows.dtype is not torch.bfloat16 or size != self.in_features:
            # the kernel would read elsewhere
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
            raise MemoryError("product")
        return out


def tiled(products: Products, weight: torch.Tensor, bias: torch.Tensor | None) -> TiledWeight:
    """A bfloat16 weight [out features, in features] on the CPU, packed."""
    bfloat16 = all(one is None or one.dtype is torch.bfloat16 for one in (weight, bias))
    if not bfloat16 or weight.shape[1] == 0 or (bias is not None and len(bias) != len(weight)):
        raise ValueError(f"no bfloat16 weight and bias: {weight.dtype} {tuple(weight.shape)}")
    if bias is not None:
        bias = bias.detach().contiguous()
    return TiledWeight(products, pack(weight.detach()), bias, *weight.shape)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The weight as products.h has it."""
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
