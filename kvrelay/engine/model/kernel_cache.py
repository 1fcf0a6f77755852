"""Bounds what oneDNN keeps of the kernels that it has made for products on the CPU.

It makes one for every layer and every number of rows that it meets, which takes 0.3 to 0.8 ms, and
keeps the last 1,024 twice: itself, and in PyTorch's interface to it. Each is a quarter to half a
MiB, so a worker that had met prompts of many lengths held half a GiB of them.
"""

from __future__ import annotations

import os

KERNELS = 256
"""Rows of 50 numbers in a model whose layers have 5 shapes; a step adds a few at most."""

_CACHES = ("LRU_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")  # the latter yields to ONEDNN_...


def bound_kernel_caches() -> None:
    """For this process, before its first product. Whoever has set a capacity keeps it."""
    for name in _CACHES:
        os.environ.setdefault(name, str(KERNELS))
