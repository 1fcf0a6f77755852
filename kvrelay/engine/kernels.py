"""What a process computes with, by name: device, instruction set and versions of the kernels."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

import torch

# Variables that limit the instruction sets of oneDNN and MKL.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")


def kernels(device: torch.device) -> Iterator[str]:
    """The parts of a numeric profile that do not depend on the model."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        yield f"cuda-{torch.version.cuda}-sm{major}{minor}"
    else:
        yield f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"
        yield from (f"{name}={os.environ[name]}" for name in _LIMITS if name in os.environ)
    yield f"torch-{torch.__version__}"
