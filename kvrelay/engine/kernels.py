"""What a process computes with, by name: device, instruction set and versions of the kernels."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

import torch

# Variables that limit the instruction sets of oneDNN and MKL, or what cuBLAS chooses from.
_CPU_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
_GPU_VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "PYTORCH_TUNABLEOP_ENABLED",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_EMULATE_SINGLE_PRECISION",
    "CUBLAS_EMULATION_STRATEGY",
)


def kernels(device: torch.device) -> Iterator[str]:
    """The parts of a numeric profile that do not depend on the model.

    A GPU is named whole: cuBLAS divides a product by the number of multiprocessors, which GPUs of
    one capability do not share.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        yield f"cuda-{torch.version.cuda}-sm{major}{minor}"
        yield "-".join(torch.cuda.get_device_name(device).split())
        variables: tuple[str, ...] = _GPU_VARIABLES
    else:
        yield f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"
        variables = _CPU_VARIABLES
    yield from (f"{name}={os.environ[name]}" for name in variables if name in os.environ)
    yield f"torch-{torch.__version__}"
