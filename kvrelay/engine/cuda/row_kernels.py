"""Triton kernels of what stands between a decoder layer's matrix products, a row at a time.

No row depends on another. Every rounding is where ``model.decoder`` has it on the CPU: they are
launched without the fusion of products and sums. ``arguments`` has the named tuples they take.
"""

import triton
import triton.language as tl


@triton.jit
def store_rows(
    key, value, pool, slots, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """K and V of one position and one kv head; a slot below 0 is padding."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        column = tl.arange(0, WIDTH)
        mask = column < DIM
        at = pool.tensor + slot // BLOCK * pool.s_block + slot % BLOCK * pool.s_pos
        at += pool.offset + head.to(tl.int64) * pool.s_head + column
        k = tl.load(key.tensor + row * key.s_row + head * key.s_head + column, mask=mask)
        v = tl.load(value.tensor + row * value.s_row + head * value.s_head + column, mask=mask)
        tl.store(at, k, mask=mask)
        tl.store(at + pool.s_kv, v, mask=mask)


@triton.jit
def _normed(wide, scale, weight, dtype: tl.constexpr):
    """Rounded before the weight is applied, and after."""
    return ((wide * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit
def add_and_norm(
    added,
    residual,
    weight,
    out,
    epsilon,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
):
    """``residual += added`` if ``ADD``, then the root-mean-square norm of a row [SIZE]."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, WIDTH)
    mask = column < SIZE
    x = tl.load(residual + row + column, mask=mask, other=0.0)
    dtype: tl.constexpr = x.dtype
    if ADD:
        more = tl.load(added + row + column, mask=mask, other=0.0)
        x = (x.to(tl.float32) + more.to(tl.float32)).to(dtype)
        tl.store(residual + row + column, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)
    gain = tl.load(weight + column, mask=mask, other=0.0)
    tl.store(out + row + column, _normed(wide, scale, gain, dtype), mask=mask)


@triton.jit
def rotate_and_store(
    joint,
    query,
    pool,
    slots,
    cosines,
    sines,
    weight,
    j_row: tl.int64,
    epsilon,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One head of one row of the joint product: queries, then keys, then values.

    Query and key heads are normed, if ``NORM``, and rotated. Queries go to ``query``
    [rows, QUERIES, DIM], keys and values to the pool.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    mask = column < DIM
    source = joint + row * j_row + head * DIM
    x = tl.load(source + column, mask=mask, other=0.0)
    dtype: tl.constexpr = x.dtype
    if head < QUERIES + KEYS:
        opposite = (column + DIM // 2) % DIM
        y = tl.load(source + opposite, mask=mask, other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, 0) / DIM + epsilon)
            gain = weight + head * DIM
            x = _normed(wide, scale, tl.load(gain + column, mask=mask, other=0.0), dtype)
            far = tl.load(gain + opposite, mask=mask, other=0.0)
            y = _normed(y.to(tl.float32), scale, far, dtype)
        cosine = tl.load(cosines + row * DIM + column, mask=mask, other=0.0).to(tl.float32)
        sine = tl.load(sines + row * DIM + column, mask=mask, other=0.0).to(tl.float32)
        near = (x.to(tl.float32) * cosine).to(dtype).to(tl.float32)
        turned = (y.to(tl.float32) * sine).to(dtype).to(tl.float32)
        x = (near + turned).to(dtype)
    if head < QUERIES:
        tl.store(query + (row * QUERIES + head) * DIM + column, x, mask=mask)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        if slot >= 0:
            other = head - QUERIES
            at = (
                pool.tensor + slot // BLOCK * pool.s_block + slot % BLOCK * pool.s_pos + pool.offset
            )
            at += other // KEYS * pool.s_kv + (other % KEYS).to(tl.int64) * pool.s_head
            tl.store(at + column, x, mask=mask)


@triton.jit
def gate_and_up(joint, out, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """``silu(gate) * up`` of one row [2 * SIZE], ``WIDTH`` columns a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = column < SIZE
    source = joint + row * (2 * SIZE) + column
    gate = tl.load(source, mask=mask, other=0.0)
    dtype: tl.constexpr = gate.dtype
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(dtype).to(tl.float32)
    up = tl.load(source + SIZE, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, (active * up).to(dtype), mask=mask)
