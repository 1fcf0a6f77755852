"""Matrix products on AMX, AVX512-BF16, AVX-512 or AVX2. A row's result depends on itself alone.

products.h defines the arithmetic of an element in bfloat16 and in float32, and the packed layout of
a weight. The arithmetic of AVX512-BF16 is its own, that of all others the same. AMX and AVX512-BF16
have no float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvrelay.engine.attention.native.arguments import KINDS

REVISION = 1  # of the arithmetic: increase it with every change of a result's bits
_PANEL = 32
_DEPTH = 32
_SIDE = 16
PAIRS = 3  # a kind of the plain product alone, as in products.h
_WORD = 4  # bytes of one column of a tile: a float32 or a pair of bfloat16

_NUMBER = ctypes.c_int64
_AT = ctypes.c_void_p
_PRODUCT = (_AT, _AT, _AT, _AT, *(_NUMBER,) * 5, _AT)

ProductFunction = Callable[..., int]
"""``kvrelay_product``; its arguments are those of products.h."""


@dataclass(frozen=True, slots=True)
class Products:
    """A variant's compiled product in a dtype.

    ``parallel`` is ``GOMP_parallel`` of torch's threads (0: one thread). ``passed_over`` has the
    reasons against better ones.
    """

    variant: str
    dtype: torch.dtype
    function: ProductFunction
    parallel: int
    passed_over: tuple[str, ...] = ()

    @property
    def profile(self) -> str:
        """The part of the numeric profile that names these products."""
        return f"products-{REVISION}-{self.variant}"

    @property
    def summary(self) -> str:
        """For people: the profile, and why there are no better ones."""
        return "; ".join((self.profile, *self.passed_over))


@dataclass(frozen=True, slots=True)
class NoProducts:
    """Why oneDNN multiplies instead.

    ``notable``: log it, since this processor could do better and oneDNN was not asked for.
    """

    reason: str
    notable: bool = True


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """A packed weight with its bias [out features], ready to multiply."""

    products: Products
    packed: torch.Tensor
    bias: torch.Tensor | None
    out_features: int
    in_features: int

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, in features] to [rows, out features]; ``ValueError`` for another dtype or size."""
        count, size = rows.shape
        dtype = self.products.dtype
        if rows.dtype is not dtype or size != self.in_features:
            raise ValueError(f"rows of {size} {rows.dtype}: not of {self.in_features} {dtype}")
        given = rows.contiguous()
        out = torch.empty((count, self.out_features), dtype=dtype)
        failed = self.products.function(
            given.data_ptr(),
            self.packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            count,
            self.out_features,
            size,
            KINDS[dtype],
            torch.get_num_threads(),
            self.products.parallel,
        )
        if failed:
            raise MemoryError(f"no memory for a product of {count} rows of {size}")
        return out


def tiled(products: Products, weight: torch.Tensor, bias: torch.Tensor | None) -> TiledWeight:
    """Pack a weight [out features, in features] on the CPU and its bias [out features].

    ``ValueError`` if one is not of the products' dtype, their sizes differ or there are no in
    features.
    """
    given = [weight] if bias is None else [weight, bias]
    fits = weight.dim() == 2 and weight.shape[1] > 0
    fits = fits and (bias is None or bias.shape == weight.shape[:1])
    if not fits or any(one.dtype is not products.dtype for one in given):
        found = [(one.dtype, tuple(one.shape)) for one in given]
        raise ValueError(f"no weight and bias of {products.dtype}: {found}")
    if bias is not None:
        bias = bias.detach().contiguous()
    return TiledWeight(products, pack(weight.detach()), bias, *weight.shape)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] to [panel, block, tile, word, output, input of a word], as products.h has it."""
    columns, numbers = weight.shape
    padding = (0, -numbers % _DEPTH, 0, -columns % _PANEL)
    whole = torch.nn.functional.pad(weight, padding) if any(padding) else weight
    blocks = whole.shape[1] // _DEPTH
    inputs = _WORD // weight.itemsize
    words = whole.reshape(-1, _PANEL // _SIDE, _SIDE, blocks, _DEPTH // inputs, inputs)
    return words.permute(0, 3, 1, 4, 2, 5).contiguous()


def product_function(loaded: ctypes.CDLL) -> ProductFunction:
    """The product of a loaded object."""
    function = loaded.kvrelay_product
    function.restype = ctypes.c_int
    function.argtypes = list(_PRODUCT)
    called: ProductFunction = function
    return called
