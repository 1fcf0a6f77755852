"""How Triton's kernels are launched, and whether this process can launch any."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Callable
from typing import Protocol

import torch

from kvrelay.engine.cuda.arguments import Contexts, LayerPool, Rows, Scoring, TileShape

OLDEST = (8, 0)
"""The oldest compute capability for which the kernels are compiled in the tests."""


class LaunchFailed(RuntimeError):
    """Triton cannot compile or load a kernel; the message says what it lacks."""


class Kernel(Protocol):
    """A function of Triton's language; subscripted with a grid it is a launch."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...


def launch(
    kernel: Kernel,
    grid: tuple[int, ...],
    *arguments: torch.Tensor | float | Rows | LayerPool | Contexts | Scoring,
    warps: int,
    stages: int = 1,
    **constants: int | bool | TileShape,
) -> None:
    """Launch programs; none if the grid is empty.

    Products and sums are not fused: a compiler would do so in one kernel and not in another, and
    elsewhere than the CPU. ``LaunchFailed`` if a kernel cannot be compiled or loaded.
    """
    if 0 in grid:
        return
    try:
        kernel[grid](
            *arguments, **constants, num_warps=warps, num_stages=stages, enable_fp_fusion=False
        )
    except _errors_of_triton() as error:
        raise LaunchFailed(
            f"{type(error).__name__}: {error} (Triton needs a C compiler, the headers of Python,"
            " libcuda.so and a folder for its cache)"
        ) from error


def _errors_of_triton() -> tuple[type[Exception], ...]:
    """What its compiler and its loader raise, besides ``RuntimeError``.

    ``AssertionError``: libcuda.so was not found (triton.backends.nvidia.driver).
    """
    from triton import TritonError

    return (TritonError, subprocess.SubprocessError, OSError, ImportError, AssertionError)


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unusable(device: torch.device) -> str | None:
    """Why the kernels cannot run on this device, ``None`` if they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if interpreted():
        return None if device.type == "cpu" else "TRITON_INTERPRET=1 computes on the CPU alone"
    if device.type != "cuda":
        return f"its kernels run on a CUDA device, and this worker computes on {device}"
    found = torch.cuda.get_device_capability(device)
    if found < OLDEST:
        return "it needs compute capability {}.{}, and the device has {}.{}".format(*OLDEST, *found)
    return None
