"""Triton kernels of what stands between a decoder layer's matrix products, a row at a time.

No row depends on another. Every rounding is where ``model.decoder`` has it on the CPU: they are
launched without the fusion of products and sums.
"""

import triton
import triton.language as tl


@triton.jit
def store_rows(
    key,
    value,
    pool,
    slots,
    k_row: tl.int64,
    k_head: tl.int64,
    v_row: tl.int64,
    v_head: tl.int64,
    s_block: tl.int64,
    s_kv: tl.int64,
    s_pos: tl.int64,
    s_head: tl.int64,
    layer_offset: tl.int64,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """K and V of one position and one kv head; a slot below 0 is padding."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        column = tl.arange(0, WIDTH)
        mask = column < DIM
        at = pool + slot // BLOCK * s_block + slot % BLOCK * s_pos
        at += layer_offset + head * s_head + column
        tl.store(at, tl.load(key + row * k_row + head * k_head + column, mask=mask), mask=mask)
        tl.store(
            at + s_kv, tl.load(value + row * v_row + head * v_head + column, mask=mask), mask=mask
        )


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
    s_block: tl.int64,
    s_kv: tl.int64,
    s_pos: tl.int64,
    s_head: tl.int64,
    layer_offset: tl.int64,
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
            at = pool + slot // BLOCK * s_block + slot % BLOCK * s_pos + layer_offset
            at += other // KEYS * s_kv + other % KEYS * s_head
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
