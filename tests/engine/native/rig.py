"""Calls of the attention kernel on pools of any strides, and attention in float64 beside them."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvrelay.engine.attention.native.arguments import arguments_of_pool
from kvrelay.engine.attention.native.library import Function

Span = tuple[int, int, Sequence[int]]  # first position, positions, block table

BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
PARALLEL = ctypes.CFUNCTYPE(None, BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


@dataclass(frozen=True, slots=True)
class Problem:
    """Attention over one layer of a pool [block, layer, k|v, position, kv head, head dim]."""

    pool: torch.Tensor
    group: int
    scale: float
    layer: int = 0
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None

    @property
    def size(self) -> int:
        return self.pool.shape[3]

    @property
    def query_shape(self) -> tuple[int, int]:
        """Query heads and their width."""
        return self.group * self.pool.shape[4], self.pool.shape[5]


class Team:
    """Stands in for an OpenMP runtime: runs a body on threads of Python, and counts its calls."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._called = PARALLEL(self._run)

    @property
    def address(self) -> int:
        return ctypes.cast(self._called, ctypes.c_void_p).value or 0

    def _run(self, body: Callable[[int], None], data: int, threads: int, flags: int) -> None:
        assert flags == 0
        self.sizes.append(threads)
        running = [threading.Thread(target=body, args=(data,)) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()


def attend(
    function: Function,
    problem: Problem,
    spans: Sequence[Span],
    query: torch.Tensor,
    threads: int = 1,
    parallel: int = 0,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
    store_only: bool = False,
) -> torch.Tensor:
    """[rows, heads, head dim] of Q to as much; ``new`` K and V are stored first.

    With ``store_only`` the kernel is not given ``query``.
    """
    rows: list[tuple[int, int, int, int]] = []
    tables: list[int] = []
    first = 0
    for start, count, table in spans:
        rows.append((first, start, count, len(tables)))
        tables.extend(table)
        first += count
    entries = np.array(rows, np.int64)
    numbers = np.array(tables, np.int32)
    assert query.shape == (first, *problem.query_shape)
    out = torch.full(query.shape, 7.0, dtype=query.dtype) if out is None else out
    a = arguments_of_pool(problem.pool)
    a.n = len(rows)
    a.entries = entries.ctypes.data
    a.tables = numbers.ctypes.data
    a.threads = threads
    a.parallel = parallel
    a.layer = problem.layer
    a.group = problem.group
    a.scale = problem.scale
    a.window = problem.window
    a.softcap = problem.softcap
    a.sinks = None if problem.sinks is None else problem.sinks.data_ptr()
    a.query = None if store_only else query.data_ptr()
    a.out = out.data_ptr()
    a.q_row = query.stride(0)
    a.q_head = query.stride(1)
    a.o_row = out.stride(0)
    a.o_head = out.stride(1)
    if new is not None:
        a.key = new[0].data_ptr()
        a.value = new[1].data_ptr()
        a.k_row = new[0].stride(0)
        a.k_head = new[0].stride(1)
        a.v_row = new[1].stride(0)
        a.v_head = new[1].stride(1)
    assert function(a) == 0
    return out


def reference(problem: Problem, span: Span, query: torch.Tensor) -> torch.Tensor:
    """One span's attention in float64."""
    start, count, table = span
    pool = problem.pool[torch.tensor(table), problem.layer].double()
    key, value = pool.transpose(0, 1).flatten(1, 2)[:, : start + count].transpose(1, 2)
    heads = key.shape[0]
    rows = query.double().transpose(0, 1).reshape(heads, -1, count, key.shape[2])
    scores = rows @ key[:, None].transpose(-1, -2) * problem.scale
    if problem.softcap:
        scores = torch.tanh(scores / problem.softcap) * problem.softcap
    back = torch.arange(start, start + count)[:, None] - torch.arange(start + count)
    hidden = (back < 0) | (back >= (problem.window or start + count))
    scores = scores.masked_fill(hidden, -torch.inf)
    if problem.sinks is not None:
        sinks = problem.sinks.double().view(heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out: torch.Tensor = weights @ value[:, None]
    return out.reshape(-1, count, key.shape[2]).transpose(0, 1)


def new_pool(
    generator: torch.Generator,
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    head_major: bool,
) -> torch.Tensor:
    """``shape``: blocks, layers, positions of a block, kv heads, head dim."""
    blocks, layers, size, heads, width = shape
    if head_major:
        made = torch.randn((blocks, heads, layers, 2, size, width), generator=generator)
        return made.to(dtype).permute(0, 2, 3, 4, 1, 5)
    return torch.randn((blocks, layers, 2, size, heads, width), generator=generator).to(dtype)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A random problem: one sequence's table and queries, and blocks that are not its own."""

    problem: Problem
    table: list[int]
    others: list[int]
    query: torch.Tensor
    sharp: bool
    told: str


def draw(rng: random.Random, longest: int = 1300) -> Drawn:
    """Every dtype, layout, group, block size, head dim, window, soft cap and sink."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16))
    group, size = rng.choice((1, 2, 4, 7)), rng.choice((1, 12, 16, 256))
    width, heads = rng.choice((64, 128, 16, 12, 80, 33, 256)), rng.choice((1, 2, 3))
    length = rng.choice((1, 2, 17, 63, 64, 65, 130, 511, 513, 700, rng.randint(1, longest)))
    used, spare = -(-length // size), 3 * -(-400 // size)
    pool = new_pool(generator, (used + spare, 2, size, heads, width), dtype, rng.random() < 0.5)
    sharp = rng.random() < 0.3
    if sharp:  # weights that are nearly one and nearly zero
        pool *= 6
    order = list(range(used + spare))
    rng.shuffle(order)
    if length % size:  # what lies behind the end is not read
        pool[order[used - 1], :, :, length % size :] = torch.nan
    query = torch.randn((length, heads * group, width), generator=generator).to(dtype)
    problem = Problem(pool, group, width**-0.5, layer=1)
    if rng.random() < 0.4:
        problem = replace(problem, window=rng.choice((1, 3, 64, 100, 512, rng.randint(1, longest))))
    if rng.random() < 0.3:
        problem = replace(problem, softcap=rng.choice((5.0, 30.0)))
    if rng.random() < 0.3:
        problem = replace(problem, sinks=torch.randn(heads * group, generator=generator) * 3)
    told = (
        f"{dtype} group {group} block {size} heads {heads} of {width} length {length}"
        f" window {problem.window} cap {problem.softcap} sinks {problem.sinks is not None}"
    )
    return Drawn(problem, order[:used], order[used:], query, sharp, told)


def pieces(rng: random.Random, length: int, most: int) -> Iterator[tuple[int, int]]:
    """Start and count of pieces of 1 to ``most`` positions."""
    start = 0
    while start < length:
        count = min(rng.randint(1, most), length - start)
        yield start, count
        start += count
