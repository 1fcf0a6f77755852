"""The device that a worker computes on: chosen at start, or refused with the reason."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from kvrelay.errors import Unservable
from kvrelay.process.gpus import VISIBLE

log = logging.getLogger(__name__)

CONTAINER = "NVIDIA_VISIBLE_DEVICES"
"""Set by NVIDIA's container runtime and images."""

_DEVICES = Path("/dev")
_WSL = Path("/usr/lib/wsl/lib")  # what Windows' drivers bring: NVIDIA's has no file in /dev


def open_device(asked: str) -> torch.device:
    """The device of "cpu" or "cuda"; for "auto" a GPU where torch can use one.

    For "cuda:N" see ``process.gpus``. Raises ``Unservable`` if the device is not there. "auto"
    raises it if torch cannot use a GPU that this container was given, or that is here beside a
    torch for CUDA: without this error the service would compute on the CPU unnoticed.
    """
    if asked not in ("auto", "cpu", "cuda"):
        raise Unservable(f"device {asked!r}: must be auto, cpu or cuda")
    if asked == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        _round_products_once()
        return torch.device("cuda")
    if asked == "cuda":
        shown = f" with {VISIBLE}={os.environ[VISIBLE]}" if VISIBLE in os.environ else ""
        raise Unservable(f"device cuda: no CUDA device is available to this torch{shown}{_why()}")
    given = os.environ.get(CONTAINER, "") not in ("", "void", "none")
    signs = [f"{CONTAINER}={os.environ[CONTAINER]}"] if given else []
    if os.environ.get(VISIBLE) not in ("", "-1"):
        files = (*_DEVICES.glob("nvidia[0-9]*"), *_WSL.glob("libcuda.so.1"))
        signs += sorted(str(path) for path in files)
    found = f"there should be a GPU ({', '.join(signs)}), and this torch cannot use it{_why()}"
    if signs and (given or torch.version.cuda is not None):
        raise Unservable(f"device auto: {found}; choose --device cpu to compute on the CPU")
    if signs:  # a torch for the CPU was installed on purpose, or by mistake
        log.warning("device auto: computing on the CPU: %s", found)
    return torch.device("cpu")


def _round_products_once() -> None:
    """Sums of products are float32, as on the CPU.

    NVIDIA's images ask for TF32 by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, and torch lets cuBLAS round
    parts of a half-precision sum.
    """
    products = torch.backends.cuda.matmul
    products.allow_tf32 = False
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False


def _why() -> str:
    built = torch.version.cuda
    if built is None:
        return f": torch {torch.__version__} was built without CUDA"
    return f": torch {torch.__version__} is built for CUDA {built}; is the driver new enough?"
