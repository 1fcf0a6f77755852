"""What FlashAttention 2 needs of a pool, a device and a version, checked before the first call.

``varlen_attn`` of torch 2.13 and the package ``flash_attn`` 2 run the same kernels. If a condition
does not hold, a kernel raises in the middle of a step or computes wrong numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import torch

from kvrelay.engine.cuda.arguments import AttentionOptions
from kvrelay.engine.cuda.launch import OLDEST

PAGE = 256
"""Positions: the block size must be a multiple of it."""

ALIGNED = 8
"""Half-precision numbers in one 16-byte load."""

_WIDEST = 256
_DTYPES = (torch.float16, torch.bfloat16)
_VARLEN = ("block_table", "enable_gqa", "num_splits", "scale", "seqused_k", "window_size")
_PREFILL = ("block_table", "causal", "softmax_scale", "window_size")
_DECODE = ("block_table", "cache_seqlens", "causal", "num_splits", "softmax_scale", "window_size")
_DIMENSIONS = ("block", "layer", "K or V", "position", "kv head")


def varlen_reasons(
    pool: torch.Tensor, options: AttentionOptions, function: Callable[..., object]
) -> tuple[str, ...]:
    """Everything against ``torch.nn.attention.varlen.varlen_attn`` (``function``) over a pool.

    Pools are [block, layer, k|v, position, kv head, head dim], of any strides.
    """
    reasons = [*_pool_reasons(pool), *_missing(function, _VARLEN, "varlen_attn of this torch")]
    if options.softcap:
        reasons.append("varlen_attn has no soft cap")
    return (*reasons, *_sink_reasons(options))


def flash_attn_reasons(
    pool: torch.Tensor,
    options: AttentionOptions,
    prefill: Callable[..., object],
    decode: Callable[..., object],
) -> tuple[str, ...]:
    """Everything against ``flash_attn_varlen_func`` and ``flash_attn_with_kvcache`` over a pool."""
    cap = ("softcap",) if options.softcap else ()
    return (
        *_pool_reasons(pool),
        *_missing(prefill, (*_PREFILL, *cap), "flash_attn_varlen_func"),
        *_missing(decode, (*_DECODE, *cap), "flash_attn_with_kvcache"),
        *_sink_reasons(options),
    )


def device_reasons(device: torch.device) -> tuple[str, ...]:
    """Everything against FlashAttention 2 on a device, with this build of torch."""
    if device.type != "cuda":
        return (f"its kernels run on a CUDA device, and this worker computes on {device}",)
    if torch.version.hip is not None:
        return (f"torch {torch.__version__} is built for ROCm, and paged calls need CUDA",)
    found = torch.cuda.get_device_capability(device)
    if found < OLDEST:
        needed, own = (".".join(map(str, version)) for version in (OLDEST, found))
        return (f"it needs compute capability {needed}, and the device has {own}",)
    return ()


def _pool_reasons(pool: torch.Tensor) -> Iterator[str]:
    if pool.dtype not in _DTYPES:
        kind = str(pool.dtype).removeprefix("torch.")
        yield f"dtype {kind}: FlashAttention computes float16 and bfloat16"
    width, size = pool.shape[5], pool.shape[3]
    if width > _WIDEST or width % ALIGNED:
        yield f"head dim {width}: must be a multiple of {ALIGNED} up to {_WIDEST}"
    if size % PAGE:
        yield f"block size {size}: must be a multiple of {PAGE} (--block-size {PAGE})"
    if pool.stride(5) != 1:
        yield f"the numbers of a head lie {pool.stride(5)} apart: they must be neighbours"
    for name, stride in zip(_DIMENSIONS, pool.stride(), strict=False):
        if stride % ALIGNED:
            yield f"stride {stride} of a {name}: must be a multiple of {ALIGNED} numbers"
    if pool.storage_offset() % ALIGNED:
        yield f"the pool begins at number {pool.storage_offset()}: must be a multiple of {ALIGNED}"


def _sink_reasons(options: AttentionOptions) -> Iterator[str]:
    if options.sinks is not None:
        yield "FlashAttention 2 has no attention sinks"


def _missing(function: Callable[..., object], names: tuple[str, ...], what: str) -> Iterator[str]:
    known = inspect.signature(function).parameters
    lacking = [name for name in names if name not in known]
    if lacking:
        yield f"{what} has no argument {', '.join(lacking)}"
