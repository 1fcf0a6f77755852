"""The arguments of the attention kernel, as arguments.h has them."""

from __future__ import annotations

import ctypes
import struct

import torch

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# The fields of a call, in one piece: setting them one by one costs as much as a small call.
CALL = struct.Struct("@qqd4P8q")
_CALL = (
    *("layer", "group", "scale", "query", "key", "value", "out"),
    *("q_row", "q_head", "k_row", "k_head", "v_row", "v_head", "o_row", "o_head"),
)
_STEP = ("entries", "tables", "n", "threads")
_POOL = (
    *("pool", "parallel", "sinks", "window", "softcap", "kind", "block_size", "kv_heads", "dim"),
    "tiles",
    *("s_block", "s_layer", "s_kv", "s_pos", "s_head"),
)
_POINTERS = {"query", "key", "value", "out", "entries", "tables", "pool", "parallel", "sinks"}
_DOUBLES = {"scale", "softcap"}


def _kind(name: str) -> type[ctypes.c_void_p | ctypes.c_double | ctypes.c_int64]:
    if name in _POINTERS:
        return ctypes.c_void_p
    return ctypes.c_double if name in _DOUBLES else ctypes.c_int64


class KernelArguments(ctypes.Structure):
    """Strides are in elements; see arguments.h for every field."""

    pool: int
    entries: int
    tables: int
    query: int | None
    key: int | None
    value: int | None
    out: int
    sinks: int | None
    parallel: int
    n: int
    threads: int
    layer: int
    kind: int
    block_size: int
    kv_heads: int
    group: int
    dim: int
    tiles: int
    s_block: int
    s_layer: int
    s_kv: int
    s_pos: int
    s_head: int
    q_row: int
    q_head: int
    k_row: int
    k_head: int
    v_row: int
    v_head: int
    o_row: int
    o_head: int
    window: int
    scale: float
    softcap: float

    _fields_ = tuple((name, _kind(name)) for name in (*_CALL, *_STEP, *_POOL))


def arguments_of_pool(pool: torch.Tensor) -> KernelArguments:
    """The part that is a pool's: [block, layer, k|v, position, kv head, head dim], any strides."""
    if pool.device.type != "cpu" or pool.dtype not in KINDS or pool.stride(5) != 1:
        raise ValueError(f"no kernel for a pool of {pool.dtype} on {pool.device}")
    made = KernelArguments()
    made.pool = pool.data_ptr()
    made.kind = KINDS[pool.dtype]
    made.block_size = pool.shape[3]
    made.kv_heads = pool.shape[4]
    made.dim = pool.shape[5]
    made.s_block = pool.stride(0)
    made.s_layer = pool.stride(1)
    made.s_kv = pool.stride(2)
    made.s_pos = pool.stride(3)
    made.s_head = pool.stride(4)
    return made
