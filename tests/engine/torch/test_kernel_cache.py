"""Products of many numbers of rows leave only so many kernels behind."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from kvrelay.engine.attention.native.library import FORCED_PRODUCTS, ONEDNN

pytestmark = [
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another libc"),
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN"),  # type: ignore[no-untyped-call]
]
# MiB in use after 300 numbers of rows, and again after 500 more.
SCRIPT = """
import ctypes, torch
from kvrelay.engine.model.packed_linear import PackedLinear, limit_onednn
limit_onednn()
class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info
def used():
    return (mallinfo().uordblks + mallinfo().hblkhd) >> 20
torch.set_num_threads(1)
layer = PackedLinear(torch.randn(64, 64), None)
rows = torch.randn(1_000, 64)
told = []
with torch.inference_mode():
    for count in range(2, 802):
        layer(rows[:count])
        if count in (2, 301, 801):
            told.append(used())
print(told[1] - told[0], told[2] - told[1])
"""


def grown(**environ: str) -> tuple[int, int]:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, FORCED_PRODUCTS: ONEDNN, **environ},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    first, second = run.stdout.split()
    return int(first), int(second)


def test_kernels_are_kept_up_to_a_bound() -> None:
    first, second = grown()
    assert first > 20
    assert second < first / 4


def test_a_capacity_set_by_the_user_is_kept() -> None:
    """And the growth above is not blind."""
    own = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    first, second = grown(LRU_CACHE_CAPACITY="1024", **{own: "1024"})
    assert second > first
