"""Linear layers on the CPU whose weights are packed once at start.

On x86 with AVX2 our own kernels multiply (``attention.native.products``), elsewhere oneDNN does.

A row's result in oneDNN does not depend on the number of rows, except for a single row, which is
therefore computed as one of several, nor on the number of threads (see ``_most_threads``). In
float32 sums of 14,336 numbers have a root mean square error of 5.9e-7 there, 2.8e-7 in our own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import cast

import torch
from transformers.pytorch_utils import Conv1D

from kvrelay.engine.attention.index import rows_computed
from kvrelay.engine.attention.native.library import MULTIPLIED, products_of
from kvrelay.engine.attention.native.products import Products, tiled
from kvrelay.process.cores import MOST_THREADS

_ROWS_HINT = 16
_COLUMNS_A_THREAD = 64
_DIVIDED_TERMS = 1537  # 1,536 were not divided, 2,048 were
KERNELS = 256
"""Rows of 50 numbers in a model whose layers have 5 shapes; a step adds a few at most."""

KERNEL_CACHES = ("LRU_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")
"""Variables that bound them; the latter yields to ``ONEDNN_PRIMITIVE_CACHE_CAPACITY``."""

Linear = Callable[[torch.Tensor], torch.Tensor]
_Reorder = Callable[[torch.Tensor, int], torch.Tensor]
_Pointwise = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, str, list[float], str], torch.Tensor
]


def limit_onednn() -> None:
    """Forbid oneDNN its AMX kernels and bound its kernel cache; call it before the first product.

    The AMX kernels of oneDNN 3.12 sum a row in an order that depends on the number of rows and
    threads; those for AVX-512 do not. oneDNN compiles a kernel for every layer and number of rows
    in 0.3 to 0.8 ms, and the last 1,024 are cached twice, by oneDNN and by PyTorch. A kernel has a
    quarter to half a MiB, so prompts of many lengths made a worker hold half a GiB of them.
    Variables that the environment already sets win.
    """
    os.environ.setdefault("DNNL_MAX_CPU_ISA", "AVX10_1_512")  # ONEDNN_MAX_CPU_ISA overrides it
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, str(KERNELS))


class PackedLinear(torch.nn.Module):
    """``nn.Linear`` without its ``weight`` attribute."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._product = _product(weight, bias)
        self.out_features = weight.shape[0]
        self.in_features = weight.shape[1]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in features] to [..., out features]."""
        flat = rows if rows.dim() == 2 else rows.reshape(-1, self.in_features)
        out = self._product(flat)
        return out if flat is rows else out.view(*rows.shape[:-1], self.out_features)


def _product(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """The product of [rows, in features] with a weight that can be packed."""
    products = products_of(weight.dtype)
    if isinstance(products, Products):
        return tiled(products, weight, bias)
    return _by_onednn(weight, bias)


def _by_onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """The product of [rows, in features] with a weight that oneDNN packs."""
    multiply = cast(_Pointwise, torch.ops.mkldnn._linear_pointwise.default)
    reorder = cast(_Reorder, torch.ops.mkldnn._reorder_linear_weight)
    packed = reorder(weight.detach(), _ROWS_HINT)
    added = None if bias is None else bias.detach()

    def product(rows: torch.Tensor) -> torch.Tensor:
        count = rows.shape[0]
        missing = rows_computed(count) - count
        if not missing:
            return multiply(rows, packed, added, "none", [], "")
        padded = torch.nn.functional.pad(rows, (0, 0, 0, missing))
        return multiply(padded, packed, added, "none", [], "")[:count]

    most = _most_threads(weight)
    return product if most == MOST_THREADS else _bounded(product, most)


def _most_threads(weight: torch.Tensor) -> int:
    """Threads of a product whose sums do not depend on how many there are.

    On AVX-512 without bfloat16, if our products are not used, oneDNN 3.12 takes its ``gemm:jit``,
    which divides sums of 2,048 terms and more where threads have fewer than 64 columns each.
    Measured for widths of 64 to 4,096, sums of 512 to 12,288, 1 to 300 rows, one to eight threads.
    """
    columns, terms = weight.shape
    if weight.dtype is not torch.bfloat16 or terms < _DIVIDED_TERMS:
        return MOST_THREADS
    return min(max(columns // _COLUMNS_A_THREAD, 1), MOST_THREADS)


def _bounded(product: Linear, most: int) -> Linear:
    """The product with at most so many threads."""

    def bounded(rows: torch.Tensor) -> torch.Tensor:
        before = torch.get_num_threads()
        if before <= most:
            return product(rows)
        torch.set_num_threads(most)
        try:
            return product(rows)
        finally:
            torch.set_num_threads(before)

    return bounded


def linear(layer: torch.nn.Linear) -> Linear:
    """The layer as a product of [rows, in features], packed if possible."""
    return _product(layer.weight, layer.bias) if _packable(layer.weight) else layer


def stacked(layers: Sequence[torch.nn.Linear]) -> Linear:
    """Layers of one input as one product, their outputs side by side."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    whole = torch.nn.Linear(weight.shape[1], weight.shape[0], bool(biases), "meta", weight.dtype)
    whole.weight = torch.nn.Parameter(weight, requires_grad=False)
    if biases:
        whole.bias = torch.nn.Parameter(torch.cat(biases), requires_grad=False)
    return linear(whole)


def pack_linears(model: torch.nn.Module) -> int:
    """Replace every plain linear layer that can be packed; returns how many were replaced.

    GPT-2's ``Conv1D`` is one with a transposed weight. Nothing is replaced on a GPU, in
    float16, or where neither our products nor oneDNN can be used.
    """
    found = [
        (parent, name, cast(torch.nn.Linear, child))
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) in (torch.nn.Linear, Conv1D)
    ]
    packable = [each for each in found if _packable(each[2].weight)]
    for parent, name, child in packable:
        weight = child.weight.T if isinstance(child, Conv1D) else child.weight
        setattr(parent, name, PackedLinear(weight, child.bias))
    return len(packable)


def _packable(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype not in MULTIPLIED:
        return False
    if isinstance(products_of(weight.dtype), Products):
        return True
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return weight.dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
