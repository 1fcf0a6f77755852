"""What of a vLLM engine decides the bits of its KV, by name: the numeric profile."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from kvrelay.engine.kernels import kernels
from kvrelay.errors import Unservable
from kvrelay.process.cores import cores_of_the_creator, threads_on_the_cores_of_the_creator

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SET_IN_RANKS = (
    *("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "VLLM_ROCM_USE_SKINNY_GEMM"),
    *("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_CUSTOM_ALLREDUCE_ALGO"),
)
"""Variables that a rank sets by itself if its kernels are batch-invariant."""

_BIND = "Name those of each rank with VLLM_CPU_OMP_THREADS_BIND, such as 0|1, or set it to nobind"
_CHOOSING = re.compile(
    r"VLLM_(?!\w*(CACHE_DIR|WARMUP|BUFFER_SIZE|CHUNK_SIZE))\w*"
    r"(ATTN|ATTENTION|MOE|GEMM|MATMUL|LINEAR|PRECISION|FP8|FP4|INT4|INT8|W4A|WNA16|QUANT|MARLIN"
    r"|CUTLASS|FLASH|TRITON|AITER|ROCM|SGL|HUMMING|OINK|HPC_OPS|ZENTORCH|INDUCTOR|TUNED_CONFIG"
    r"|KERNEL|FUSED|FUSION|ACCUM|ALLREDUCE|ALL_REDUCE|SYMM_MEM)"
)
"""Names of vLLM's variables that choose kernels."""


def attention_of(config: VllmConfig) -> str:
    """The attention backend that vLLM chooses, and on the CPU its kernel."""
    from vllm.config import set_current_vllm_config

    model, cache = config.model_config, config.cache_config
    with set_current_vllm_config(config):
        size = model.get_head_size()
        return attention_backend(size, model.dtype, cache.block_size, cache.cache_dtype)


def attention_backend(size: int, dtype: torch.dtype, block_size: int, kv_dtype: str) -> str:
    """The backend for heads of ``size`` under vLLM's current configuration."""
    from vllm.v1.attention.selector import get_attn_backend

    backend: str = get_attn_backend(size, dtype, kv_dtype).get_name()
    if backend != "CPU_ATTN":
        return backend.lower()
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return f"cpu_attn-{_get_attn_isa(dtype, block_size, size, kv_dtype)}"


def batch_invariant() -> bool:
    """Whether vLLM was asked for kernels whose rows do not depend on the batch."""
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


def threads_of_ranks(config: VllmConfig) -> str:
    """CPU threads of each rank, such as ``2`` or ``2+2``.

    vLLM counts them in the process that starts the ranks, from its cores; a rank, which is bound to
    its own, counts the same here. ``Unservable`` if there are too few for so many ranks.
    """
    from vllm import envs
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    executor = config.parallel_config.distributed_executor_backend
    if executor == "mp" and envs.VLLM_CPU_OMP_THREADS_BIND != "nobind":
        try:
            with threads_on_the_cores_of_the_creator():
                return "+".join(str(len(cores)) for cores in OMPProcessManager(config).cpu_lists)
        except AssertionError as error:
            raise Unservable(f"vLLM has no cores for its ranks: {error} {_BIND}") from error
    return os.environ.get("OMP_NUM_THREADS") or str(len(cores_of_the_creator()))


def numeric_profile(config: VllmConfig, attention: str) -> str:
    """The profile of an engine with this configuration.

    It names what it knows and computes no probe: workers of one profile run one version of vLLM
    and torch with the same kernels on the same instruction set with as many threads and ranks.
    """
    return "/".join(_parts(config, attention))


def _parts(config: VllmConfig, attention: str) -> Iterator[str]:
    from vllm.version import __version__

    kind = config.device_config.device_type
    model = config.model_config
    yield f"vllm-{__version__}"
    for part in (*kernels(torch.device(kind)), *_choices()):
        if not (batch_invariant() and part.startswith(SET_IN_RANKS)):
            yield part
    yield attention
    yield f"runner-v{2 if config.use_v2_model_runner else 1}"
    yield f"compiled-{int(config.compilation_config.mode or 0)}"
    yield f"ops-{_operations(config)}"
    if model.model_impl != "auto":
        yield f"model-{model.model_impl}"
    dtype = str(model.dtype).removeprefix("torch.")
    if config.cache_config.cache_dtype not in ("auto", dtype):
        yield f"computed-in-{dtype}"
    if model.quantization:
        yield f"quantized-{model.quantization}"
    if batch_invariant():
        yield "batch-invariant"
    if kind == "cpu":
        yield f"threads-{threads_of_ranks(config)}"
    yield f"tp{config.parallel_config.tensor_parallel_size}"


def _choices() -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if _CHOOSING.match(name):
            yield f"{name}={value}"


def _operations(config: VllmConfig) -> str:
    """A digest of which kernels compute the layers' operations, and which are fused."""
    compilation = config.compilation_config
    chosen = (
        sorted(set(compilation.custom_ops)),
        compilation.pass_config.compute_hash(),
        config.kernel_config.compute_hash(),
    )
    return hashlib.sha256(repr(chosen).encode()).hexdigest()[:8]
