"""What every object of the kernel must do; run on one by ``.. checks FILE SEED CASES``."""

from __future__ import annotations

import ctypes
import mmap
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch

from kvrelay.engine.attention.native.library import Function, definition, entry_of, tiles_refused
from kvrelay.engine.attention.native.self_test import differs
from tests.engine.native.rig import Drawn, Problem, Span, Team, attend, draw, pieces, reference

# The largest error of weights that are neither sharp nor flat, and of sharp ones.
LIMITS = {
    torch.float32: (1e-5, 1e-3),
    torch.float16: (4e-3, 3e-2),
    torch.bfloat16: (3e-2, 2e-1),
}
NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python 3.11 does not name
STATM = Path("/proc/self/statm")
AFFORDABLE = 3e6  # multiply-adds of the plain object: a few of a hundredth of a second


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """To the bit: the sign of a zero and the bits of a NaN too."""
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def check_random(function: Function, oracle: Function, seed: int, cases: int) -> None:
    """Random problems: as in float64, as the plain object, however cut, whatever is beside."""
    for case in range(cases):
        rng = random.Random(f"{seed} {case}")
        drawn = draw(rng)
        told = f"seed {seed} case {case}: {drawn.told}"
        whole = _whole(function, drawn, told)
        _check_plain(rng, function, oracle, drawn, whole, told)
        _check_cuts(rng, function, drawn, whole, told)
        _check_threads(rng, function, drawn, whole, told)


def _whole(function: Function, drawn: Drawn, told: str) -> torch.Tensor:
    """All rows in one call, near those in float64."""
    span = (0, len(drawn.query), drawn.table)
    whole = attend(function, drawn.problem, [span], drawn.query)
    error = (whole.double() - reference(drawn.problem, span, drawn.query)).abs().max().item()
    limit = LIMITS[drawn.query.dtype][drawn.sharp] * (6 if drawn.sharp else 1)
    assert error < limit, f"{told}: off by {error}"
    return whole


def _check_plain(
    rng: random.Random,
    function: Function,
    oracle: Function,
    drawn: Drawn,
    whole: torch.Tensor,
    told: str,
) -> None:
    """As many rows as can be afforded, the last one among them, from the plain object."""
    length, problem = len(drawn.query), drawn.problem
    cost = length * 2 * problem.pool.shape[5] * problem.query_shape[0]
    rows = sorted({length - 1, *rng.sample(range(length), min(length, int(AFFORDABLE / cost)))})
    spans = [(row, 1, drawn.table) for row in rows]
    assert same(attend(oracle, problem, spans, drawn.query[rows]), whole[rows]), f"{told}: plain"


def _check_cuts(
    rng: random.Random, function: Function, drawn: Drawn, whole: torch.Tensor, told: str
) -> None:
    """In pieces beside strangers; each row alone, and all rows as decode entries of one call."""
    length, query, problem = len(drawn.query), drawn.query, drawn.problem
    for most in (1, 7, 300):
        cut = pieces(rng, length, most)
        for start, count in cut if most > 1 else rng.sample([*cut], min(length, 12)):
            spans, rows, at = _beside(rng, drawn, (start, count, drawn.table))
            rows[at : at + count] = query[start : start + count]
            got = attend(function, problem, spans, rows)[at : at + count]
            assert same(got, whole[start : start + count]), f"{told}: {start} to {start + count}"
    if length <= 700:
        spans = [(row, 1, drawn.table) for row in range(length)]
        assert same(attend(function, problem, spans, query), whole), f"{told}: as decode entries"


def _beside(rng: random.Random, drawn: Drawn, own: Span) -> tuple[list[Span], torch.Tensor, int]:
    """The span among strangers, noisy queries for all of them, and where its rows begin."""
    spans: list[Span] = []
    width = len(drawn.others) // 3
    for number in range(rng.randint(0, 3)):
        end = rng.randint(1, 400)
        count = rng.choice((1, 1, rng.randint(1, end)))
        spans.append((end - count, count, drawn.others[number * width :][:width]))
    before = rng.randint(0, len(spans))
    at = sum(count for _, count, _ in spans[:before])
    spans.insert(before, own)
    rows = torch.randn(sum(count for _, count, _ in spans), *drawn.problem.query_shape)
    return spans, rows.to(drawn.query.dtype), at


def _check_threads(
    rng: random.Random, function: Function, drawn: Drawn, whole: torch.Tensor, told: str
) -> None:
    team = Team()
    length = len(drawn.query)
    for threads in (2, 3, 8):
        for start in {0, length - 1, rng.randrange(length)}:
            span = (start, length - start, drawn.table)
            query = drawn.query[start:]
            got = attend(function, drawn.problem, [span], query, threads, team.address)
            assert same(got, whole[start:]), f"{told}: from {start} on {threads} threads"


def check_long(function: Function) -> None:
    """One kv head with a long context: its key range is divided among threads."""
    generator = torch.Generator().manual_seed(5)
    for dtype in (torch.float32, torch.bfloat16):
        pool = torch.randn((300, 1, 2, 16, 1, 128), generator=generator).to(dtype)
        problem = Problem(pool, 4, 0.1)
        query = torch.randn((4, 4, 128), generator=generator).to(dtype)
        table = list(range(300))
        spans = [(4700, 2, table), (4798, 1, table), (2100, 1, table)]
        alone = attend(function, problem, spans, query)
        parts = (query[:2], query[2:3], query[3:])
        want = torch.cat([reference(problem, s, q) for s, q in zip(spans, parts, strict=True)])
        assert (alone.double() - want).abs().max().item() < LIMITS[dtype][0]
        windowed = replace(problem, window=1000)
        bounded = attend(function, windowed, spans, query)
        for threads in (2, 3, 8):
            team = Team()
            assert same(attend(function, problem, spans, query, threads, team.address), alone)
            assert same(attend(function, windowed, spans, query, threads, team.address), bounded)
            assert team.sizes == [threads, threads]


def check_isolation(function: Function, oracle: Function) -> None:
    """A NaN or an infinity reaches the rows that see it, and no bit of another."""
    generator = torch.Generator().manual_seed(9)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        pool = torch.randn((8, 1, 2, 16, 2, 48), generator=generator).to(dtype)
        query = torch.randn((90, 4, 48), generator=generator).to(dtype)
        table = [3, 1, 6, 0, 7, 2]
        for window in (0, 37):
            problem = Problem(pool, 2, 0.2, window=window)
            clean = attend(function, problem, [(0, 90, table)], query)
            for bad in (torch.nan, torch.inf):
                _check_spoilt_query(function, problem, query, clean, table, bad)
                for at in (0, 31, 32, 64, 88):
                    for part in (0, 1):
                        _check_spoilt(function, oracle, problem, query, clean, table, at, part, bad)


def _check_spoilt_query(
    function: Function,
    problem: Problem,
    query: torch.Tensor,
    clean: torch.Tensor,
    table: list[int],
    bad: float,
) -> None:
    """Q of one row is no number."""
    spoilt = query.clone()
    spoilt[40, 2] = bad
    got = attend(function, problem, [(0, 90, table)], spoilt)
    told = f"{query.dtype} window {problem.window}: {bad} in Q"
    assert bool(got[40, 2].isnan().all()), told
    others = torch.ones(90, 4, dtype=torch.bool)
    others[40, 2] = False
    assert same(got[others], clean[others]), told


def _check_spoilt(
    function: Function,
    oracle: Function,
    problem: Problem,
    query: torch.Tensor,
    clean: torch.Tensor,
    table: list[int],
    at: int,
    part: int,
    bad: float,
) -> None:
    """K (part 0) or V of one position of kv head 1 is no number."""
    pool = problem.pool.clone()
    pool[table[at // 16], 0, part, at % 16, 1, 5] = bad
    spoilt = attend(function, replace(problem, pool=pool), [(0, 90, table)], query)
    seen = torch.zeros(90, 4, dtype=torch.bool)
    seen[at : at + (problem.window or 90), 2:] = True
    told = f"{query.dtype} window {problem.window}: {bad} in {'KV'[part]} of position {at}"
    assert same(spoilt[~seen], clean[~seen]), told
    if bad != bad:
        reached = spoilt[seen].isnan()
        assert bool(reached.all() if part == 0 else reached[:, 5].all()), told
        if part == 1:
            others = [d for d in range(48) if d != 5]
            assert same(spoilt[:, :, others], clean[:, :, others]), told
    rows = [31, 32, 70]
    spans = [(row, 1, table) for row in rows]
    wanted = attend(oracle, replace(problem, pool=pool), spans, query[rows])
    assert same(spoilt[rows], wanted), told


def check_store(function: Function) -> None:
    """New K and V go to their positions, from any strides, and nothing else is written."""
    generator = torch.Generator().manual_seed(3)
    for dtype in (torch.float32, torch.bfloat16):
        for head_major in (False, True):
            shape = (6, 3, 2, 3, 4, 20) if head_major else (6, 2, 3, 2, 4, 20)
            pool = torch.full((6, 3, 2, 4, 2, 20), 5.0, dtype=dtype)
            if head_major:
                pool = torch.full((6, 2, 3, 2, 4, 20), 5.0, dtype=dtype).permute(0, 2, 3, 4, 1, 5)
            assert pool.shape == (6, 3, 2, 4, 2, 20), shape
            joint = torch.randn((8, 6, 20), generator=generator).to(dtype)
            query, key, value = joint[:, :2], joint[:, 2:4], joint[:, 4:]
            spans = [(6, 1, [4, 2]), (3, 7, [5, 0, 3])]
            want = pool.clone()
            want[2, 1, 0, 2] = key[0]
            want[2, 1, 1, 2] = value[0]
            for i, position in enumerate(range(3, 10)):
                block = spans[1][2][position // 4]
                want[block, 1, 0, position % 4] = key[1 + i]
                want[block, 1, 1, position % 4] = value[1 + i]
            problem = Problem(pool, 1, 0.3, layer=1)
            out = attend(function, problem, spans, query, new=(key, value))
            assert same(pool, want)
            assert same(out, attend(function, replace(problem, pool=want), spans, query))
            pool.fill_(5.0)
            out.fill_(3.0)
            attend(function, problem, spans, query, new=(key, value), out=out, store_only=True)
            assert same(pool, want)
            assert out.eq(3.0).all()


def check_many_stored(function: Function) -> None:
    """New K and V of long prompts, stored by several threads."""
    generator = torch.Generator().manual_seed(4)
    pool = torch.zeros((30, 1, 2, 16, 2, 32), dtype=torch.bfloat16)
    query, key, value = torch.randn((3, 300, 2, 32), generator=generator).bfloat16()
    order = torch.randperm(30, generator=generator).tolist()
    spans = [(9, 170, order[:12]), (0, 130, order[12:])]
    want = pool.clone()
    places = [(table, at) for first, count, table in spans for at in range(first, first + count)]
    for row, (table, at) in enumerate(places):
        want[table[at // 16], 0, :, at % 16] = torch.stack((key[row], value[row]))
    wanted = attend(function, Problem(want, 1, 0.3), spans, query)
    for threads in (1, 3):
        empty, team = pool.clone(), Team()
        problem = Problem(empty, 1, 0.3)
        out = attend(function, problem, spans, query, threads, team.address, new=(key, value))
        assert same(empty, want)
        assert same(out, wanted)
        assert team.sizes == ([] if threads == 1 else [3, 3])  # to store, to attend


def check_windows(function: Function) -> None:
    """Windows of more than a tile: a row of a prompt sees what it sees alone."""
    generator = torch.Generator().manual_seed(8)
    table = torch.randperm(20, generator=generator).tolist()
    for dtype in (torch.float32, torch.bfloat16):
        pool = torch.randn((20, 1, 2, 16, 2, 32), generator=generator).to(dtype)
        query = torch.randn((300, 4, 32), generator=generator).to(dtype)
        for window in (64, 65, 70, 127, 150):
            problem = Problem(pool, 2, 0.3, window=window)
            alone = attend(function, problem, [(at, 1, table) for at in range(300)], query)
            assert same(attend(function, problem, [(0, 300, table)], query), alone), window


def check_tiny_calls_stay_in_one_thread(function: Function) -> None:
    pool = torch.randn(4, 1, 2, 16, 2, 64)
    team = Team()
    span = (40, 1, [0, 1, 2])
    attend(function, Problem(pool, 2, 0.1), [span], torch.randn(1, 4, 64), 8, team.address)
    assert team.sizes == []


def check_nothing_is_kept(function: Function) -> None:
    """Of a call that is split by keys: its parts take 50 MB."""
    if not STATM.exists():  # only Linux tells
        return
    pool = torch.zeros((8192, 1, 2, 16, 2, 16), dtype=torch.bfloat16)
    query = torch.zeros((96, 16, 16), dtype=torch.bfloat16)
    attend(function, Problem(pool, 8, 0.3), [(0, 1, [0])], query[:1])
    before, team = _resident(), Team()
    spans = [(8192 * 16 - 96, 96, list(range(8192)))]
    attend(function, Problem(pool, 8, 0.3), spans, query, 3, team.address)
    assert team.sizes == [3]
    assert _resident() - before < 16 << 20


def check_many_parts(function: Function) -> None:
    """Of items that would be split some are not: their parts may take 64 MB."""
    generator = torch.Generator().manual_seed(9)
    pool = torch.randn((4096, 1, 2, 16, 8, 16), generator=generator).bfloat16()
    query = torch.randn((96, 64, 16), generator=generator).bfloat16()
    spans = [(4096 * 16 - 96, 96, list(range(4096)))]
    alone = attend(function, Problem(pool, 8, 0.3), spans, query)
    assert same(attend(function, Problem(pool, 8, 0.3), spans, query, 4, Team().address), alone)


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(STATM.read_text().split()[1]) * mmap.PAGESIZE


def check_order(function: Function, oracle: Function) -> None:
    """Sums whose terms cancel are nothing but their rounding, so any other order shows."""
    generator = torch.Generator().manual_seed(2)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        shape = (8, 1, 2, 16, 2, 64)
        sizes = torch.randint(-10, 11, shape, generator=generator).double().exp2()
        pool = (torch.randn(shape, generator=generator) * sizes).to(dtype)
        query = torch.randn((1, 4, 64), generator=generator).to(dtype)
        order = torch.randperm(32, generator=generator)
        pool[:, :, 0, :, :, 32:] = -pool[:, :, 0, :, :, order]
        query[:, :, 32:] = query[:, :, order]
        pool[4:, :, 1] = -pool[:4, :, 1].flip(2)
        for scale in (1e-30, 3e4):  # weights of one; weights by the rounding of scores
            problem = Problem(pool, 2, scale)
            span = (127, 1, [4, 2, 0, 1, 7, 6, 3, 5])
            got = attend(function, problem, [span], query)
            assert same(got, attend(oracle, problem, [span], query)), (dtype, scale)
            assert got.count_nonzero() > got.numel() / 2, (dtype, scale)


def check_far(function: Function) -> None:
    """A pool of more than 2 ** 31 elements; only the pages of its four blocks are touched."""
    step = 1 << 30
    for dtype in (torch.float32, torch.bfloat16):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        memory = mmap.mmap(-1, (3 * step + (1 << 20)) * dtype.itemsize, flags=flags)
        flat = torch.frombuffer(memory, dtype=dtype)
        pool = flat.as_strided((4, 1, 2, 16, 2, 32), (step, 2048, 1024, 64, 32, 1))
        pool.copy_(torch.randn(pool.shape))
        span = (0, 60, [3, 0, 2, 1])
        problem, query = Problem(pool, 2, 0.2), torch.randn(60, 4, 32).to(dtype)
        near = replace(problem, pool=pool.contiguous())
        got = attend(function, problem, [span], query)
        assert same(got, attend(function, near, [span], query))
        error = (got.double() - reference(near, span, query)).abs().max().item()
        assert error < LIMITS[dtype][0]
        new = torch.randn(1, 2, 32).to(dtype), torch.randn(1, 2, 32).to(dtype)
        attend(function, problem, [(5, 1, [3])], query[:1], new=new)
        assert same(pool[3, 0, :, 5], torch.cat(new))


def everything(function: Function, oracle: Function, seed: int, cases: int) -> None:
    """All checks, the quick ones first."""
    difference = differs(function, oracle)
    assert difference is None, difference
    check_tiny_calls_stay_in_one_thread(function)
    check_far(function)
    check_order(function, oracle)
    check_store(function)
    check_many_stored(function)
    check_windows(function)
    check_isolation(function, oracle)
    check_long(function)
    check_random(function, oracle, seed, cases)


if __name__ == "__main__":
    path, variant, seed, cases = sys.argv[1:]
    tiles_refused()  # asks the system for tiles, which an object with AMX may use
    everything(entry_of(ctypes.CDLL(path)), definition(variant), int(seed), int(cases))
