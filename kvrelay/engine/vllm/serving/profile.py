"""What of a vLLM engine decides the bits of its KV, by name: the numeric profile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from kvrelay.engine.kernels import kernels

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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


def numeric_profile(config: VllmConfig, attention: str, threads: int) -> str:
    """The profile of an engine with this configuration.

    It names what it knows and computes no probe: workers of one profile run one version of vLLM
    and torch with the same kernels on the same instruction set with as many threads and ranks.
    """
    return "/".join(_parts(config, attention, threads))


def _parts(config: VllmConfig, attention: str, threads: int) -> Iterator[str]:
    from vllm.version import __version__

    kind = config.device_config.device_type
    yield f"vllm-{__version__}"
    yield from kernels(torch.device(kind))
    yield attention
    yield f"runner-v{2 if config.use_v2_model_runner else 1}"
    yield f"compiled-{int(config.compilation_config.mode or 0)}"
    if config.model_config.quantization:
        yield f"quantized-{config.model_config.quantization}"
    if batch_invariant():
        yield "batch-invariant"
    if kind == "cpu":
        yield f"threads{threads}"
    yield f"tp{config.parallel_config.tensor_parallel_size}"
