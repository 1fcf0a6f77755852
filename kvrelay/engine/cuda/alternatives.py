"""What the attention of other libraries needs of a pool and a device, checked before a first call.

``varlen_attn`` of torch 2.13 and the package ``flash_attn`` 2 are the same FlashAttention 2 inside.
A condition that does not hold is an error of a kernel, or wrong numbers, in the middle of a step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

_PAGE = 256  # positions of a page are a multiple of it
_WIDEST = 256
_ALIGNED = 8  # 16 bytes of half precision
_DTYPES = (torch.float16, torch.bfloat16)
_OLDEST = (8, 0)
_VARLEN = ("block_table", "enable_gqa", "num_splits", "scale", "seqused_k", "window_size")
_PREFILL = ("block_table", "causal", "softmax_scale", "window_size")
_DECODE = ("block_table", "cache_seqlens", "causal", "num_splits", "softmax_scale", "window_size")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What is asked of a backend; ``capability`` is the device's."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    capability: tuple[int, int]
    softcap: bool = False
    sinks: bool = False


def varlen_reasons(shape: AttentionShape, function: Callable[..., object]) -> tuple[str, ...]:
    """Everything against ``torch.nn.attention.varlen.varlen_attn`` (``function``)."""
    reasons = [*_flash_reasons(shape), *_missing(function, _VARLEN, "varlen_attn of this torch")]
    if shape.softcap:
        reasons.append("varlen_attn has no soft cap")
    return tuple(reasons)


def flash_attn_reasons(
    shape: AttentionShape, prefill: Callable[..., object], decode: Callable[..., object]
) -> tuple[str, ...]:
    """Everything against ``flash_attn_varlen_func`` and ``flash_attn_with_kvcache``."""
    cap = ("softcap",) if shape.softcap else ()
    return (
        *_flash_reasons(shape),
        *_missing(prefill, (*_PREFILL, *cap), "flash_attn_varlen_func"),
        *_missing(decode, (*_DECODE, *cap), "flash_attn_with_kvcache"),
    )


def _flash_reasons(shape: AttentionShape) -> Iterator[str]:
    if shape.dtype not in _DTYPES:
        kind = str(shape.dtype).removeprefix("torch.")
        yield f"dtype {kind}: FlashAttention computes float16 and bfloat16"
    if shape.head_dim > _WIDEST or shape.head_dim % _ALIGNED:
        yield f"head dim {shape.head_dim}: must be a multiple of {_ALIGNED} up to {_WIDEST}"
    if shape.heads % shape.kv_heads:
        yield f"{shape.heads} heads are no multiple of {shape.kv_heads} kv heads"
    if shape.block_size % _PAGE:
        yield f"block size {shape.block_size}: pages must be multiples of {_PAGE} positions"
    if shape.capability < _OLDEST:
        yield "compute capability {}.{}: must be 8.0 or newer".format(*shape.capability)
    if shape.sinks:
        yield "FlashAttention 2 has no attention sinks"


def _missing(function: Callable[..., object], names: tuple[str, ...], what: str) -> Iterator[str]:
    known = inspect.signature(function).parameters
    lacking = [name for name in names if name not in known]
    if lacking:
        yield f"{what} has no argument {', '.join(lacking)}"
