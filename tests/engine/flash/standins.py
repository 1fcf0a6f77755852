"""Stand-ins for the calls of FlashAttention 2, on the CPU, with the signatures of the real ones.

They refuse what the real ones refuse, read pages by the strides and the table that they are given,
and compute in float64. What a kernel leaves uncomputed is NaN.
"""

from __future__ import annotations

from types import ModuleType

import torch

PAGE, ALIGNED = 256, 8


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """As ``torch.nn.attention.varlen.varlen_attn`` of torch 2.13."""
    assert return_aux is None
    assert cu_seq_k is not None, "offsets of Q and K must be both set or both not set"
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert num_splits == 1, "with more splits the numbers are wrong, or depend on the batch"
    assert block_table is not None
    assert seqused_k is not None
    _integers(cu_seq_q, cu_seq_k, seqused_k)
    return _attend(
        query, key, value, cu_seq_q, seqused_k, block_table, max_q, max_k, scale, window_size, 0.0
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``flash_attn.flash_attn_varlen_func`` of flash_attn 2.8.3.post2."""
    assert not dropout_p
    assert not deterministic
    assert not return_attn_probs
    assert alibi_slopes is None
    assert block_table is not None
    _integers(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q > 1 or max_seqlen_k <= 64, "one row each: KV would be split"
    return _attend(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k.diff(),
        block_table,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        _bounds(causal and max_seqlen_q > 1, window_size),
        softcap,
    )


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    """As ``flash_attn.flash_attn_with_kvcache`` of flash_attn 2.8.3.post2."""
    for one in (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes):
        assert one is None
    assert rotary_interleaved
    assert not return_softmax_lse
    assert num_splits == 1, "the number of splits depends on the batch"
    assert isinstance(cache_seqlens, torch.Tensor)
    assert block_table is not None
    _integers(cache_seqlens)
    entries, rows, heads, width = q.shape
    assert cache_seqlens.shape == (entries,)
    offsets = torch.arange(0, entries * rows + 1, rows, dtype=torch.int32)
    out = _attend(
        q.reshape(entries * rows, heads, width),
        k_cache,
        v_cache,
        offsets,
        cache_seqlens,
        block_table,
        rows,
        block_table.shape[1] * k_cache.shape[1],
        softmax_scale,
        _bounds(causal and rows > 1, window_size),
        softcap,
    )
    return out.view(q.shape)


def flash_attn_module() -> ModuleType:
    """The package ``flash_attn``."""
    made = ModuleType("flash_attn")
    names = {
        "__version__": "2.8.3.post2",
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "flash_attn_with_kvcache": flash_attn_with_kvcache,
    }
    made.__dict__.update(names)
    return made


def _bounds(causal: bool, window: tuple[int, int]) -> tuple[int, int]:
    return (window[0], 0) if causal else window


def _integers(*tensors: torch.Tensor) -> None:
    for one in tensors:
        assert one.dtype is torch.int32
        assert one.is_contiguous()


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    most_rows: int,
    longest: int,
    scale: float | None,
    window: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """Rows that ``most_rows`` does not cover stay NaN: no program of the grid computes them."""
    entries = len(offsets) - 1
    _layout(query, key, value)
    assert entries > 0
    assert lengths.shape == (entries,)
    assert table.shape[0] == entries
    assert table.dtype is torch.int32
    assert table.stride(-1) == 1
    assert int(table.min()) >= 0
    assert int(table.max()) < key.shape[0]
    grouped = query.shape[1] > key.shape[2] and max(window) < 0
    assert most_rows > 1 or not grouped or query.shape[0] == entries, "one row of each is expected"
    left, right = (-1 if longest <= bound else bound for bound in window)
    out = torch.full(query.shape, torch.nan, dtype=torch.float64)
    for entry in range(entries):
        first, end = int(offsets[entry]), int(offsets[entry + 1])
        length, pages = int(lengths[entry]), -(int(lengths[entry]) // -key.shape[1])
        assert pages <= table.shape[1], "the table is shorter than the entry"
        own = table[entry, :pages].long()
        keys, values = (each[own].flatten(0, 1)[:length].double() for each in (key, value))
        rows = min(end - first, most_rows)
        seen = _seen(rows, end - first, length, left, right)
        here = slice(first, first + rows)
        out[here] = _softmax(query[here].double(), keys, values, seen, scale, softcap)
    return out.to(query.dtype)


def _layout(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """What the kernels need to load 16 bytes at once."""
    assert key.shape == value.shape
    assert key.shape[1] % PAGE == 0
    assert query.shape[1] % key.shape[2] == 0
    assert query.dtype is key.dtype is value.dtype
    for one in (query, key, value):
        assert one.stride(-1) == 1
        assert not any(stride % ALIGNED for stride in one.stride()[:-1])
        assert one.storage_offset() % ALIGNED == 0


def _seen(rows: int, all_rows: int, length: int, left: int, right: int) -> torch.Tensor:
    """[rows, keys]: the last of all rows is at the last key; bounds below 0 are none."""
    ahead = torch.arange(length) - (torch.arange(rows)[:, None] + length - all_rows)
    seen = torch.ones(ahead.shape, dtype=torch.bool)
    if left >= 0:
        seen &= ahead >= -left
    if right >= 0:
        seen &= ahead <= right
    return seen


def _softmax(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    scale: float | None,
    softcap: float,
) -> torch.Tensor:
    """Q [rows, heads, head dim] over keys [keys, kv heads, head dim]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(group, 1) for each in (keys, values))
    scores = torch.einsum("rhd,khd->hrk", query, keys)
    scores = scores * (query.shape[2] ** -0.5 if scale is None else scale)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hrk,khd->rhd", weights, values)
