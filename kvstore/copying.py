"""Copies between segments and pools, without holding up the other threads of the process."""

from __future__ import annotations

import numpy as np

LARGE = 128 << 10
"""From here on a copy takes longer than calling numpy, which lets other threads run meanwhile."""


def copy(target: memoryview, source: memoryview) -> None:
    """Copy as many bytes as both have; ``ValueError`` if they differ in length."""
    if len(source) < LARGE:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
