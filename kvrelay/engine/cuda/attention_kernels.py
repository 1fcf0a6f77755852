"""Triton kernels of attention over a paged KV pool of any strides.

A row's result is a function of its query, its keys and constants alone. Keys are read in tiles of
``KEYS`` from position 0; the tiles of a segment of ``SEGMENT`` keys are summed in order, and the
segments are merged in order. Prefill does that in one program and decode in one program a segment,
with the same functions, so a row does not depend on where a prompt is cut or on other rows, as far
as a matrix product does not depend on the number of its rows.

``spans`` [entries, 4] has of each entry its first row in Q, its first position, its number of
positions and where its block table begins in ``blocks``. Scores are kept in units of log2(e).
Offsets are 64-bit: pools of more than 2 ** 31 elements are usual. Arguments that are named tuples,
and ``TILE``, are those of ``arguments``.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend_segment(
    query, head, table, position, low, begin, end, pool, scoring, TILE: tl.constexpr
):
    """Largest score, sum of weights and weighted V of rows over keys ``[begin, end)``.

    ``head`` is where the kv head begins in the layer. ``begin`` is a multiple of ``KEYS``; keys
    below ``low`` are not read. A tile that hides all its keys from a row changes nothing of it.
    """
    column = tl.arange(0, TILE.WIDTH)
    wide = column < TILE.DIM
    best = tl.full([TILE.ROWS], float("-inf"), tl.float32)
    total = tl.full([TILE.ROWS], 0.0, tl.float32)
    out = tl.full([TILE.ROWS, TILE.WIDTH], 0.0, tl.float32)
    for first in range(begin, end, TILE.KEYS):
        key = first + tl.arange(0, TILE.KEYS)
        read = (key >= low) & (key < end)
        block = tl.load(table + key // TILE.BLOCK, mask=read, other=0).to(tl.int64)
        at = head + block * pool.s_block + key % TILE.BLOCK * pool.s_pos
        keys = tl.load(at[None, :] + column[:, None], mask=read[None, :] & wide[:, None], other=0.0)
        score = tl.dot(query, keys, input_precision="ieee") * scoring.scale
        if TILE.CAPPED:  # softcap * tanh(score / softcap)
            cap = scoring.softcap
            score = cap - 2.0 * cap / (tl.exp2(score * (2.0 * LOG2_E / cap)) + 1.0)
        score = score * LOG2_E
        seen = read[None, :] & (key[None, :] <= position[:, None])
        if TILE.WINDOWED:
            seen = seen & (key[None, :] > position[:, None] - scoring.window)
        score = tl.where(seen, score, float("-inf"))
        top = tl.maximum(best, tl.max(score, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(score - base[:, None])
        fade = tl.exp2(best - base)
        values = tl.load(
            at[:, None] + pool.s_kv + column[None, :], mask=read[:, None] & wide[None, :], other=0.0
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


@triton.jit(do_not_specialize=["entries", "first_row"])
def attend_prefill(
    query, out, pool, contexts, sinks, entries, first_row, scoring, TILE: tl.constexpr
):
    """``ROWS // GROUP`` positions of one entry and the ``GROUP`` query heads of one kv head.

    Entry ``i`` owns the tiles from ``(its first row - first_row) // positions of a tile + i`` on:
    enough for its positions, without an index of tiles. Programs of tiles that are none return.
    """
    POSITIONS: tl.constexpr = TILE.ROWS // TILE.GROUP
    number = tl.program_id(0)
    kv_head = tl.program_id(1)
    entry = _entry_of_tile(contexts.spans, entries, first_row, number, POSITIONS)
    span = contexts.spans + entry * 4
    row = tl.load(span)
    start = tl.load(span + 1)
    count = tl.load(span + 2)
    tile = number - ((row - first_row) // POSITIONS + entry)
    before = tile * POSITIONS
    if before < count:
        index = tl.arange(0, TILE.ROWS)
        place = before + index // TILE.GROUP
        head = kv_head * TILE.GROUP + index % TILE.GROUP
        live = (place < count) & (index < POSITIONS * TILE.GROUP)
        column = tl.arange(0, TILE.WIDTH)
        mask = live[:, None] & (column < TILE.DIM)[None, :]
        line = (row + place).to(tl.int64)
        head = tl.where(live, head, 0)
        rows = tl.load(
            query.tensor + (line * query.s_row + head * query.s_head)[:, None] + column[None, :],
            mask=mask,
            other=0.0,
        )
        end = start + tl.minimum(before + POSITIONS, count)
        low = 0
        if TILE.WINDOWED:
            low = tl.maximum(start + before - scoring.window + 1, 0)
        best = tl.full([TILE.ROWS], float("-inf"), tl.float32)
        total = tl.full([TILE.ROWS], 0.0, tl.float32)
        state = tl.full([TILE.ROWS, TILE.WIDTH], 0.0, tl.float32)
        table = contexts.blocks + tl.load(span + 3)
        for segment in range(low // TILE.SEGMENT, tl.cdiv(end, TILE.SEGMENT)):
            next_best, next_total, next_state = _attend_segment(
                rows,
                pool.tensor + pool.offset + kv_head.to(tl.int64) * pool.s_head,
                table,
                start + place,
                low,
                tl.maximum(segment * TILE.SEGMENT, low // TILE.KEYS * TILE.KEYS),
                tl.minimum((segment + 1) * TILE.SEGMENT, end),
                pool,
                scoring,
                TILE,
            )
            best, total, state = _merge(best, total, state, next_best, next_total, next_state)
        result = _finish(best, total, state, sinks, head, TILE.SINKS)
        tl.store(
            out.tensor + (line * out.s_row + head * out.s_head)[:, None] + column[None, :],
            result.to(out.tensor.dtype.element_ty),
            mask=mask,
        )


@triton.jit
def attend_decode(query, partial, weights, pool, contexts, scoring, TILE: tl.constexpr):
    """One segment of keys, one entry of one position, the query heads of one kv head.

    ``partial`` [entries, kv heads, segments, group, head dim] and ``weights`` [.., group, 2] (the
    largest score and the sum) are float32. An entry of no positions is padding.
    """
    entry = tl.program_id(0)
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    span = contexts.spans + entry * 4
    position = tl.load(span + 1)
    count = tl.load(span + 2)
    low = 0
    if TILE.WINDOWED:
        low = tl.maximum(position - scoring.window + 1, 0)
    first = segment * TILE.SEGMENT
    if (count > 0) & (first <= position) & (first + TILE.SEGMENT > low):
        index = tl.arange(0, TILE.ROWS)
        live = index < TILE.GROUP
        head = kv_head * TILE.GROUP + tl.where(live, index, 0)
        column = tl.arange(0, TILE.WIDTH)
        mask = live[:, None] & (column < TILE.DIM)[None, :]
        line = tl.load(span).to(tl.int64)
        rows = tl.load(
            query.tensor + (line * query.s_row + head * query.s_head)[:, None] + column[None, :],
            mask=mask,
            other=0.0,
        )
        best, total, state = _attend_segment(
            rows,
            pool.tensor + pool.offset + kv_head.to(tl.int64) * pool.s_head,
            contexts.blocks + tl.load(span + 3),
            position + tl.full([TILE.ROWS], 0, tl.int32),
            low,
            tl.maximum(first, low // TILE.KEYS * TILE.KEYS),
            tl.minimum(first + TILE.SEGMENT, position + 1),
            pool,
            scoring,
            TILE,
        )
        part = (entry.to(tl.int64) * tl.num_programs(1) + kv_head) * tl.num_programs(2) + segment
        at = part * TILE.GROUP + index
        tl.store(weights + at * 2, best, mask=live)
        tl.store(weights + at * 2 + 1, total, mask=live)
        tl.store(partial + at[:, None] * TILE.DIM + column[None, :], state, mask=mask)


@triton.jit(do_not_specialize=["segments"])
def combine_segments(partial, weights, out, spans, sinks, segments, window, TILE: tl.constexpr):
    """Merge the segments of one entry and kv head in their order, as ``attend_prefill`` does."""
    entry = tl.program_id(0)
    kv_head = tl.program_id(1)
    span = spans + entry * 4
    position = tl.load(span + 1)
    if tl.load(span + 2) > 0:
        index = tl.arange(0, TILE.ROWS)
        live = index < TILE.GROUP
        column = tl.arange(0, TILE.WIDTH)
        mask = live[:, None] & (column < TILE.DIM)[None, :]
        best = tl.full([TILE.ROWS], float("-inf"), tl.float32)
        total = tl.full([TILE.ROWS], 0.0, tl.float32)
        state = tl.full([TILE.ROWS, TILE.WIDTH], 0.0, tl.float32)
        low = 0
        if TILE.WINDOWED:
            low = tl.maximum(position - window + 1, 0)
        part = (entry.to(tl.int64) * tl.num_programs(1) + kv_head) * segments
        for segment in range(low // TILE.SEGMENT, position // TILE.SEGMENT + 1):
            at = (part + segment) * TILE.GROUP + index
            best, total, state = _merge(
                best,
                total,
                state,
                tl.load(weights + at * 2, mask=live, other=float("-inf")),
                tl.load(weights + at * 2 + 1, mask=live, other=0.0),
                tl.load(partial + at[:, None] * TILE.DIM + column[None, :], mask=mask, other=0.0),
            )
        head = kv_head * TILE.GROUP + tl.where(live, index, 0)
        result = _finish(best, total, state, sinks, head, TILE.SINKS)
        line = tl.load(span).to(tl.int64)
        tl.store(
            out.tensor + (line * out.s_row + head * out.s_head)[:, None] + column[None, :],
            result.to(out.tensor.dtype.element_ty),
            mask=mask,
        )
