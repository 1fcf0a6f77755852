"""Triton kernels of attention over a paged KV pool of any strides.

A row's result is a function of its query, its keys and constants alone. Keys are read in tiles of
``KEYS`` from position 0; the tiles of a segment of ``SEGMENT`` keys are summed in order, and the
segments are merged in order. Prefill does that in one program and decode in one program a segment,
with the same functions, so a row does not depend on where a prompt is cut or on what is beside it,
as far as a product of matrices does not depend on the number of its rows.

``spans`` [entries, 4] has of each entry its first row in Q, its first position, its number of
positions and where its block table begins in ``blocks``. Scores are kept in units of log2(e).
Offsets are 64-bit: pools of more than 2 ** 31 elements are usual.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend_segment(
    query,
    pool,
    table,
    position,
    low,
    begin,
    end,
    s_block,
    s_kv,
    s_pos,
    scale,
    window,
    softcap,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Largest score, sum of weights and weighted V of rows over keys ``[begin, end)``.

    ``begin`` is a multiple of ``KEYS``; keys below ``low`` are not read. A tile that hides all its
    keys from a row changes nothing of that row.
    """
    column = tl.arange(0, WIDTH)
    wide = column < DIM
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(begin, end, KEYS):
        key = first + tl.arange(0, KEYS)
        read = (key >= low) & (key < end)
        block = tl.load(table + key // BLOCK, mask=read, other=0).to(tl.int64)
        at = pool + block * s_block + (key % BLOCK) * s_pos
        keys = tl.load(at[None, :] + column[:, None], mask=read[None, :] & wide[:, None], other=0.0)
        score = tl.dot(query, keys, input_precision="ieee") * scale
        if CAPPED:  # softcap * tanh(score / softcap)
            score = softcap - 2.0 * softcap / (tl.exp2(score * (2.0 * LOG2_E / softcap)) + 1.0)
        score = score * LOG2_E
        seen = read[None, :] & (key[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (key[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
        top = tl.maximum(best, tl.max(score, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(score - base[:, None])
        fade = tl.exp2(best - base)
        values = tl.load(
            at[:, None] + s_kv + column[None, :], mask=read[:, None] & wide[None, :], other=0.0
        )
        added = tl.dot(weight.to(values.dtype), values, input_precision="ieee")
        out = out * fade[:, None] + added
        total = total * fade + tl.sum(weight, 1)
        best = top
    return best, total, out


@triton.jit
def _merge(best, total, out, next_best, next_total, next_out):
    """The state of a row over two ranges of keys, the second after the first."""
    top = tl.maximum(best, next_best)
    base = tl.where(top == float("-inf"), 0.0, top)
    fade = tl.exp2(best - base)
    gain = tl.exp2(next_best - base)
    out = out * fade[:, None] + next_out * gain[:, None]
    return top, total * fade + next_total * gain, out


@triton.jit
def _finish(best, total, out, sinks, head, SINKS: tl.constexpr):
    """The attention of rows; a sink is a score without a value."""
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.maximum(best, sink)
        fade = tl.exp2(best - top)
        total = total * fade + tl.exp2(sink - top)
        out = out * fade[:, None]
    return out / total[:, None] + 0.0  # a zero has one sign, whatever was hidden


@triton.jit
def _entry_of_tile(spans, entries, first_row, number, POSITIONS: tl.constexpr):
    """The last entry whose first tile is not behind this one."""
    lower = 0
    upper = entries
    while lower < upper:
        middle = (lower + upper) // 2
        if (tl.load(spans + middle * 4) - first_row) // POSITIONS + middle <= number:
            lower = middle + 1
        else:
            upper = middle
    return lower - 1


@triton.jit
def attend_prefill(
    query,
    out,
    pool,
    spans,
    blocks,
    sinks,
    entries,
    first_row,
    q_row: tl.int64,
    q_head: tl.int64,
    o_row: tl.int64,
    o_head: tl.int64,
    s_block: tl.int64,
    s_kv: tl.int64,
    s_pos: tl.int64,
    s_head: tl.int64,
    layer_offset: tl.int64,
    scale,
    window,
    softcap,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """``ROWS // GROUP`` positions of one entry and the ``GROUP`` query heads of one kv head.

    Entry ``i`` owns the tiles from ``(its first row - first_row) // positions of a tile + i`` on:
    enough for its positions, without an index of tiles. Programs of tiles that are none return.
    """
    POSITIONS: tl.constexpr = ROWS // GROUP
    number = tl.program_id(0)
    kv_head = tl.program_id(1)
    entry = _entry_of_tile(spans, entries, first_row, number, POSITIONS)
    span = spans + entry * 4
    row = tl.load(span)
    start = tl.load(span + 1)
    count = tl.load(span + 2)
    tile = number - ((row - first_row) // POSITIONS + entry)
    before = tile * POSITIONS
    if before < count:
        index = tl.arange(0, ROWS)
        place = before + index // GROUP
        head = kv_head * GROUP + index % GROUP
        live = (place < count) & (index < POSITIONS * GROUP)
        column = tl.arange(0, WIDTH)
        mask = live[:, None] & (column < DIM)[None, :]
        line = (row + place).to(tl.int64)
        head = tl.where(live, head, 0)
        rows = tl.load(
            query + line[:, None] * q_row + head[:, None] * q_head + column[None, :],
            mask=mask,
            other=0.0,
        )
        position = start + place
        end = start + tl.minimum(before + POSITIONS, count)
        low = 0
        if WINDOWED:
            low = tl.maximum(start + before - window + 1, 0)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        state = tl.zeros([ROWS, WIDTH], tl.float32)
        table = blocks + tl.load(span + 3)
        base = pool + layer_offset + kv_head * s_head
        for segment in range(low // SEGMENT, tl.cdiv(end, SEGMENT)):
            next_best, next_total, next_state = _attend_segment(
                rows,
                base,
                table,
                position,
                low,
                tl.maximum(segment * SEGMENT, low // KEYS * KEYS),
                tl.minimum((segment + 1) * SEGMENT, end),
                *(s_block, s_kv, s_pos, scale, window, softcap),
                *(ROWS, KEYS, BLOCK, DIM, WIDTH, WINDOWED, CAPPED),
            )
            best, total, state = _merge(best, total, state, next_best, next_total, next_state)
        result = _finish(best, total, state, sinks, head, SINKS)
        tl.store(
            out + line[:, None] * o_row + head[:, None] * o_head + column[None, :],
            result.to(out.dtype.element_ty),
            mask=mask,
        )


@triton.jit
def attend_decode(
    query,
    partial,
    weights,
    pool,
    spans,
    blocks,
    q_row: tl.int64,
    q_head: tl.int64,
    s_block: tl.int64,
    s_kv: tl.int64,
    s_pos: tl.int64,
    s_head: tl.int64,
    layer_offset: tl.int64,
    scale,
    window,
    softcap,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """One segment of keys, one entry of one position, the query heads of one kv head.

    ``partial`` [entries, kv heads, segments, group, head dim] and ``weights`` [.., group, 2] (the
    largest score and the sum) are float32. An entry of no positions is padding.
    """
    entry = tl.program_id(0)
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    span = spans + entry * 4
    position = tl.load(span + 1)
    count = tl.load(span + 2)
    low = 0
    if WINDOWED:
        low = tl.maximum(position - window + 1, 0)
    first = segment * SEGMENT
    if (count > 0) & (first <= position) & (first + SEGMENT > low):
        index = tl.arange(0, ROWS)
        live = index < GROUP
        head = kv_head * GROUP + tl.where(live, index, 0)
        column = tl.arange(0, WIDTH)
        mask = live[:, None] & (column < DIM)[None, :]
        line = tl.load(span).to(tl.int64)
        rows = tl.load(
            query + line * q_row + head[:, None] * q_head + column[None, :], mask=mask, other=0.0
        )
        best, total, state = _attend_segment(
            rows,
            pool + layer_offset + kv_head * s_head,
            blocks + tl.load(span + 3),
            position + tl.zeros([ROWS], tl.int32),
            low,
            tl.maximum(first, low // KEYS * KEYS),
            tl.minimum(first + SEGMENT, position + 1),
            s_block,
            s_kv,
            s_pos,
            scale,
            window,
            softcap,
            ROWS,
            KEYS,
            BLOCK,
            DIM,
            WIDTH,
            WINDOWED,
            CAPPED,
        )
        part = (entry.to(tl.int64) * tl.num_programs(1) + kv_head) * tl.num_programs(2) + segment
        at = part * GROUP + index
        tl.store(weights + at * 2, best, mask=live)
        tl.store(weights + at * 2 + 1, total, mask=live)
        tl.store(partial + at[:, None] * DIM + column[None, :], state, mask=mask)


@triton.jit
def combine_segments(
    partial,
    weights,
    out,
    spans,
    sinks,
    segments,
    o_row: tl.int64,
    o_head: tl.int64,
    window,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Merge the segments of one entry and kv head in their order, as ``attend_prefill`` does."""
    entry = tl.program_id(0)
    kv_head = tl.program_id(1)
    span = spans + entry * 4
    position = tl.load(span + 1)
    if tl.load(span + 2) > 0:
        index = tl.arange(0, ROWS)
        live = index < GROUP
        column = tl.arange(0, WIDTH)
        mask = live[:, None] & (column < DIM)[None, :]
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        state = tl.zeros([ROWS, WIDTH], tl.float32)
        low = 0
        if WINDOWED:
            low = tl.maximum(position - window + 1, 0)
        part = (entry.to(tl.int64) * tl.num_programs(1) + kv_head) * segments
        for segment in range(low // SEGMENT, position // SEGMENT + 1):
            at = (part + segment) * GROUP + index
            best, total, state = _merge(
                best,
                total,
                state,
                tl.load(weights + at * 2, mask=live, other=float("-inf")),
                tl.load(weights + at * 2 + 1, mask=live, other=0.0),
                tl.load(partial + at[:, None] * DIM + column[None, :], mask=mask, other=0.0),
            )
        head = kv_head * GROUP + tl.where(live, index, 0)
        result = _finish(best, total, state, sinks, head, SINKS)
        line = tl.load(span).to(tl.int64)
        tl.store(
            out + line * o_row + head[:, None] * o_head + column[None, :],
            result.to(out.dtype.element_ty),
            mask=mask,
        )
