"""What holds of the interpreted kernels: ``python -m tests.engine.cuda.checks CHECK.. SEED``.

Programs run in random order. Pools hold NaN wherever no position of the problem lies.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from torch.nn.functional import silu

from tests.engine.cuda.interpreter import ORDER, there, vast  # isort: skip (it comes before every kernel)

from kvrelay.engine.attention.batch import no_works
from kvrelay.engine.attention.triton_backend import slots_of
from kvrelay.engine.cuda.arguments import SEGMENT, AttentionOptions
from kvrelay.engine.cuda.attention import PagedEntries, PagedPool
from kvrelay.engine.cuda.rows import gated, norm, rotate
from kvrelay.engine.model.decoder import Decoder
from kvrelay.engine.model.decoder_weights import DecoderLayer, DecoderWeights, HeadLayout, RmsNorm
from tests.engine.native.rig import Drawn, Problem, Span, draw, new_pool, pieces, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Largest error against float64: rounded weights and outputs, of values of size 1 and 6.
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 0.04, torch.float16: 0.006}


def entries_of(spans: Sequence[Span], decodes: int, size: int) -> PagedEntries:
    """The device's view of spans, the first ``decodes`` of which are of one row each."""
    table = np.zeros((len(spans), 4), np.int64)
    table[:, 1] = [start for start, _, _ in spans]
    table[:, 2] = [count for _, count, _ in spans]
    table[:, 0] = np.cumsum(table[:, 2]) - table[:, 2]
    lengths = [len(blocks) for _, _, blocks in spans]
    table[:, 3] = np.cumsum(lengths) - lengths
    blocks = np.concatenate([np.array(own, np.int32) for _, _, own in spans])
    slots = slots_of(table, blocks, size)
    return PagedEntries(
        spans=there(torch.from_numpy(table.astype(np.int32))),
        blocks=there(torch.from_numpy(blocks)),
        slots=there(torch.from_numpy(slots)),
        decodes=decodes,
        prefill_rows=len(slots) - decodes,
        longest=int(table[:decodes, 1].max()) + 1 if decodes else 0,
    )


def attend(
    problem: Problem, spans: Sequence[Span], query: torch.Tensor, decodes: int = 0
) -> torch.Tensor:
    """Q [rows, heads, head dim] over what is stored, in host memory."""
    options = AttentionOptions(problem.window, problem.softcap, there(problem.sinks))
    entries = entries_of(spans, decodes, problem.size)
    pool = PagedPool(there(problem.pool))
    return pool.attend(problem.layer, there(query), entries, problem.scale, options).cpu()


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """To the bit."""
    bits = [one.cpu().contiguous().view(torch.uint8) for one in (got, want)]
    return torch.equal(*bits)


def random_problems(rng: random.Random) -> None:
    """Any shape: near float64; the same bits however cut, as decode rows, and beside others."""
    for case in range(14):
        drawn = draw(rng, 1100)
        _spoil(drawn)
        told = f"case {case}: {drawn.told}"
        query, table, problem = drawn.query, drawn.table, drawn.problem
        length = len(query)
        whole = attend(problem, [(0, length, table)], query)
        _near(problem, (0, length, table), query, whole, 6 if drawn.sharp else 1, told)
        rows = sorted({length - 1, *rng.sample(range(1, length), min(length - 1, 4))} - {0})
        if rows:
            alone = attend(problem, [(row, 1, table) for row in rows], query[rows], len(rows))
            assert same(alone, whole[rows]), f"{told}: rows {rows} as decode entries"
        cut = rng.sample([*pieces(rng, length, 300)], 1)
        for start, count in cut:
            strangers = [drawn.others[:1]] * 3
            spans: list[Span] = [(0, 1, own) for own in strangers[: rng.randint(0, 3)]]
            before = len(spans)
            spans += [(start, count, table), (0, 1, strangers[0])]
            noise = torch.randn(before + count + 1, *problem.query_shape).to(query.dtype)
            noise[before : before + count] = query[start : start + count]
            got = attend(problem, spans, noise)[before : before + count]
            assert same(got, whole[start : start + count]), f"{told}: {start} to {start + count}"


def _spoil(drawn: Drawn) -> None:
    """NaN in all layers but the problem's own, and what lies before every window."""
    drawn.problem.pool[:, 1 - drawn.problem.layer] = torch.nan


def _near(
    problem: Problem,
    span: Span,
    query: torch.Tensor,
    got: torch.Tensor,
    size: float,
    told: str,
) -> None:
    error = (got.double() - reference(problem, span, query)).abs().max().item()
    assert error < LIMITS[query.dtype] * size, f"{told}: off by {error}"


def many_entries(rng: random.Random) -> None:
    """Mixed steps: decode entries, padding and prefill entries of many lengths in one call."""
    for dtype in DTYPES:
        generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
        group, size = rng.choice((1, 2, 3, 7)), rng.choice((1, 7, 16))
        made = new_pool(generator, (900 // size * 3, 2, size, 2, 32), dtype, rng.random() < 0.5)
        free = list(range(made.shape[0]))
        rng.shuffle(free)
        pool = torch.full_like(made, torch.nan)  # keeps the strides
        spans: list[Span] = []
        asked = ((37, 1), (600, 1), (5, 1), (0, 70), (3, 9), (511, 2), (0, 1), (64, 64))
        for start, count in asked:
            table = [free.pop() for _ in range(-(-(start + count) // size))]
            spans.append((start, count, table))
            for place in range(start + count):
                at = (table[place // size], 1, slice(None), place % size)
                pool[at] = made[at]
        rows = sum(count for _, count, _ in spans)
        query = torch.randn((rows, 2 * group, 32), generator=generator).to(dtype)
        problem = Problem(pool, group, 0.2, layer=1)
        for variant in (problem, replace(problem, window=rng.choice((1, 50, 512, 520)))):
            got = attend(variant, spans, query, 3)
            first = 0
            for span in spans:
                here = slice(first, first + span[1])
                filled = replace(variant, pool=pool.nan_to_num())
                told = f"{dtype} group {group} block {size} {variant.window} {span[:2]}"
                _near(filled, span, query[here], got[here], 1, told)
                first += span[1]


def padded_entries(rng: random.Random) -> None:
    """Entries of no positions and slots of -1, as a captured graph has them, touch nothing."""
    pool = torch.full((4, 1, 2, 16, 2, 32), torch.nan)
    pool[1] = torch.randn(pool[1].shape)
    entries = entries_of([(9, 1, [1]), (9, 0, [3]), (9, 0, [3])], 3, 16)
    slots = there(torch.tensor([25, -1, -1], dtype=torch.int32))
    entries = replace(entries, slots=slots, prefill_rows=0)
    entries.spans[1:, ::3] = 1 << 29  # a row and a table that may not be touched
    before = pool.clone()
    pool = there(pool)
    paged = PagedPool(pool)
    key, value, query = there(torch.randn(3, 3, 2, 32))
    paged.store(0, entries.slots, key, value)
    before[1, 0, :, 9] = torch.stack((key[0], value[0])).cpu()
    assert same(pool, before)
    got = paged.attend(0, query, entries, 0.2, AttentionOptions()).cpu()
    want = reference(Problem(before, 1, 0.2), (9, 1, [1]), query[:1].cpu())
    assert (got[:1].double() - want).abs().max().item() < LIMITS[torch.float32]


def stored(rng: random.Random) -> None:
    """New K and V go to their slots from any strides, in any layout; nothing else is written."""
    for dtype in DTYPES:
        for head_major in (False, True):
            size, heads, dim = rng.choice((1, 4, 7)), rng.choice((1, 3)), rng.choice((16, 20, 24))
            generator = torch.Generator().manual_seed(1)
            pool = there(new_pool(generator, (40, 3, size, heads, dim), dtype, head_major))
            free = list(range(1, 40))  # slot 0 is used: it is no padding
            rng.shuffle(free)
            spans = [(6, 1, free[:7]), (0, 1, [0]), (3, 7, free[10:20])]
            joint = there(torch.randn((9, 5 * heads, dim), generator=generator).to(dtype))
            key, apart = joint[:, : 2 * heads : 2], joint[:, 2 * heads :].clone()
            value = apart[:, ::3]  # strides of its own
            want = pool.clone()
            row = 0
            for start, count, table in spans:
                for place in range(start, start + count):
                    want[table[place // size], 2, 0, place % size] = key[row]
                    want[table[place // size], 2, 1, place % size] = value[row]
                    row += 1
            PagedPool(pool).store(2, entries_of(spans, 1, size).slots, key, value)
            assert same(pool, want), f"{dtype} head-major {head_major} block {size} dim {dim}"


def far(rng: random.Random) -> None:
    """Pools of more than 2 ** 32 elements, of which only the pages of a few blocks are touched.

    Numbers are 32-bit where they fit: the first stride does not, the second does.
    """
    for dtype in (torch.bfloat16, torch.float32):
        for step, last in ((1 << 31, 3), (1 << 20, 4200)):
            table = [last, 0, 2, 1]
            flat = vast(last * step + (1 << 21), dtype)
            pool = flat.as_strided((last + 1, 2, 2, 16, 2, 32), (step, 2048, 1024, 64, 32, 1))
            for block in table:
                pool[block].copy_(torch.randn(pool.shape[1:]))
            problem = Problem(pool, 2, 0.2, layer=1)
            near = replace(problem, pool=torch.stack([pool[block].cpu() for block in table]))
            query = torch.randn(60, 4, 32).to(dtype)
            got = attend(problem, [(0, 60, table)], query)
            _near(near, (0, 60, [0, 1, 2, 3]), query, got, 1, f"far {dtype} {step}")
            assert same(attend(problem, [(59, 1, table)], query[59:], 1), got[59:])
            new = there(torch.randn(2, 1, 2, 32).to(dtype))
            slots = there(torch.tensor([last * 16 + 5], dtype=torch.int32))
            PagedPool(pool).store(1, slots, new[0], new[1])
            assert same(pool[last, 1, :, 5], new[:, 0])
            joint = there(torch.randn(1, 5 * 32).to(dtype))
            angles = torch.ones_like(joint[:, :32]), torch.zeros_like(joint[:, :32])
            rotate(joint, 1, PagedPool(pool), 1, slots, angles, None, 0.0)
            assert same(pool[last, 1, :, 5].reshape(-1), joint[0, 32:])


def long_contexts(rng: random.Random) -> None:
    """Around the ends of segments: a decode row has the bits of the row in a prefill."""
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
        pool = new_pool(generator, (2 * SEGMENT // 16 + 20, 1, 16, 1, 32), dtype, True)
        pool *= 3
        table = list(range(pool.shape[0]))
        rng.shuffle(table)
        sinks = torch.randn(4, generator=generator) * 2
        sinks[0] = -90.0  # no weight, and far below every score
        problem = Problem(pool, 4, 0.3, sinks=sinks)
        for end in (SEGMENT, SEGMENT + 1, SEGMENT + 20, 2 * SEGMENT - 1, 2 * SEGMENT + 70):
            count = 40 if end == SEGMENT + 20 else rng.choice((1, 2, 40))
            query = torch.randn((count, 4, 32), generator=generator).to(dtype)
            for window in (0, 3, SEGMENT, SEGMENT + 5):
                variant = replace(problem, window=window, softcap=rng.choice((0.0, 8.0)))
                span = (end - count, count, table)
                told = f"{dtype} {span[:2]} window {window} cap {variant.softcap}"
                hidden = pool.clone()
                for block in range(max(end - count - window + 1, 0) // 16 if window else 0):
                    hidden[table[block]] = torch.nan
                kept = replace(variant, pool=hidden)
                got = attend(kept, [span], query)
                _near(variant, span, query, got, 3, told)
                last = attend(kept, [(end - 1, 1, table)], query[-1:], 1)
                assert same(last, got[-1:]), told


def isolated(rng: random.Random) -> None:
    """A NaN in K of one kv head reaches the rows that see it, and no bit of another."""
    pool = torch.randn(8, 1, 2, 16, 2, 32)
    query = torch.randn(90, 4, 32)
    table = [3, 1, 6, 0, 7, 2]
    clean = attend(Problem(pool, 2, 0.2), [(0, 90, table)], query)
    for at in (0, 31, 64, 88):
        spoilt = pool.clone()
        spoilt[table[at // 16], 0, 0, at % 16, 1, 5] = torch.nan
        got = attend(Problem(spoilt, 2, 0.2), [(0, 90, table)], query)
        seen = torch.zeros(90, 4, dtype=torch.bool)
        seen[at:, 2:] = True
        assert same(got[~seen], clean[~seen]), at
        assert bool(got[seen].isnan().all()), at


def norms(rng: random.Random) -> None:
    """Sum and norm of rows, against the decoder's."""
    for dtype in DTYPES:
        for size in (1, 48, 96, 127, 2560):
            rows = rng.choice((1, 5))
            first, second = torch.randn(2, rows, size).to(dtype)
            residual = there(first.clone())
            owner = RmsNorm((1 + torch.randn(size) / 3).to(dtype), rng.choice((1e-6, 1e-2)))
            alone = norm(None, residual, there(owner.weight), owner.epsilon)
            _rounded_alike(alone, owner(first), f"norm {dtype} {size}")
            want = second + first
            got = norm(there(second), residual, there(owner.weight), owner.epsilon)
            assert same(residual, want), f"sum {dtype} {size}"
            _rounded_alike(got, owner(want), f"sum and norm {dtype} {size}")


class _Kept:
    """A step that keeps what the decoder gives it."""

    inputs = no_works().inputs(torch.device("cpu"))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        self.query = query.clone()
        self.new = torch.stack((key, value), 1)
        return query.contiguous()


def rotations(rng: random.Random) -> None:
    """Norm and rotation of heads, and the store of K and V, against the decoder's."""
    for dtype in DTYPES:
        for normed in (False, True):
            for dim, queries, keys in ((12, 4, 2), (64, 3, 1), (24, 2, 2)):
                rows = 9
                joint = (torch.randn(rows, (queries + 2 * keys) * dim) * 2).to(dtype)
                angle = torch.randn(rows, dim // 2).repeat(1, 2)
                signed = torch.cat((-angle.sin()[:, : dim // 2], angle.sin()[:, dim // 2 :]), 1)
                angles = (angle.cos().to(dtype), signed.to(dtype))
                weight = (1 + torch.randn(queries + keys, dim) / 3).to(dtype)
                owner = RmsNorm(weight, 1e-2) if normed else None
                layer = SimpleNamespace(qkv=lambda _, given=joint: given, heads_norm=owner)
                weights = SimpleNamespace(heads=HeadLayout(queries, keys, dim, 1.0))
                step = _Kept()
                Decoder(cast(DecoderWeights, weights))._attend(
                    cast(DecoderLayer, layer),
                    0,
                    joint,
                    angles[0][:, None],
                    angles[1][:, None],
                    step,
                )
                pool = torch.full((5, 2, 2, 4, keys, dim), 7.0, dtype=dtype)
                if rng.random() < 0.5:
                    pool = pool.permute(0, 4, 1, 2, 3, 5).contiguous().permute(0, 2, 3, 4, 1, 5)
                order = rng.sample(range(20), rows)
                order[2] = -1
                if 0 not in order:
                    order[0] = 0
                told = f"rotation {dtype} normed {normed} dim {dim}"
                pool = there(pool)
                query = rotate(
                    there(joint),
                    queries,
                    PagedPool(pool),
                    1,
                    there(torch.tensor(order, dtype=torch.int32)),
                    (there(angles[0]), there(angles[1])),
                    there(weight) if normed else None,
                    1e-2,
                )
                _rounded_alike(query, step.query, told)
                want = torch.full((20, 2, keys, dim), 7.0, dtype=dtype)
                for row, slot in enumerate(order):
                    if slot >= 0:
                        want[slot] = step.new[row]
                got = pool.cpu().transpose(1, 3).reshape(20, 2, 2, keys, dim)
                _rounded_alike(got[:, :, 1], want, told)
                assert bool((got[:, :, 0] == 7).all()), told


def gates(rng: random.Random) -> None:
    """The gated activation, against the decoder's."""
    for dtype in DTYPES:
        for size in (1, 96, 1023, 2500):
            joint = (torch.randn(3, 2 * size) * 4).to(dtype)
            joint[0, :size] *= 60  # an exponential of float32 ends at 88
            gate, up = joint.chunk(2, -1)
            want = silu(gate).mul_(up)
            _rounded_alike(gated(there(joint)), want, f"gate {dtype} {size}")


def _rounded_alike(got: torch.Tensor, want: torch.Tensor, told: str) -> None:
    """Bits in half precision but for a few last places; some last places in float32."""
    assert got.shape == want.shape, told
    assert got.dtype is want.dtype, told
    got = got.cpu()
    if got.dtype is torch.float32:
        torch.testing.assert_close(got, want, rtol=3e-6, atol=1e-6, msg=told)
        return
    torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-3, msg=told)
    differ = (got != want).float().mean().item()
    assert differ <= 0.004 + 1.01 / got.numel(), f"{told}: {differ:.1%} of the numbers differ"


CHECKS: dict[str, Callable[[random.Random], None]] = {
    "norms": norms,
    "rotations": rotations,
    "gates": gates,
    "stored": stored,
    "padded": padded_entries,
    "isolated": isolated,
    "many": many_entries,
    "far": far,
    "long": long_contexts,
    "random": random_problems,
}


def run(name: str, seed: int) -> None:
    """One check with its own numbers and its own order of programs."""
    rng = random.Random(f"{name} {seed}")
    torch.manual_seed(rng.randrange(1 << 31))
    ORDER.seed(rng.random())
    with torch.inference_mode():
        CHECKS[name](rng)


if __name__ == "__main__":
    *names, number = sys.argv[1:]
    for one in names or CHECKS:
        run(one, int(number))
        print(f"{one} (seed {number}): passed", flush=True)
