"""What any products must do; ``.. product_checks FILE VARIANT SEED CASES`` runs it on an object."""

from __future__ import annotations

import ctypes
import random
import sys
from dataclasses import replace

import torch

from kvrelay.engine.attention.native.build import AMX
from kvrelay.engine.attention.native.library import (
    BFLOAT16_ONLY,
    product_definition,
    tiles_refused,
)
from kvrelay.engine.attention.native.products import (
    Products,
    TiledWeight,
    product_function,
    tiled,
)
from kvrelay.engine.attention.native.self_test import products_differ
from tests.engine.native.checks import same
from tests.engine.native.rig import Team

ROWS = (*range(1, 71), 128, 257, 385, 400, 512, 545, 1040)
COLUMNS = (1, 15, 16, 17, 31, 32, 33, 48, 100, 260, 544)
SIZES = (1, 2, 31, 32, 33, 64, 70, 257, 300, 513, 1040)


def dtypes_of(variant: str) -> tuple[torch.dtype, ...]:
    """What an object multiplies."""
    return (torch.bfloat16,) if variant in BFLOAT16_ONLY else (torch.bfloat16, torch.float32)


def numbers(own: Products, generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(own.dtype)


def layer(
    own: Products,
    generator: torch.Generator,
    columns: int,
    size: int,
    bias: bool = False,
) -> tuple[TiledWeight, torch.Tensor, torch.Tensor | None]:
    """A product, its weight and its bias."""
    weight = numbers(own, generator, columns, size)
    added = numbers(own, generator, columns) if bias else None
    return tiled(own, weight, added), weight, added


def of_plain(product: TiledWeight) -> TiledWeight:
    """The same weight, multiplied by the definition."""
    own = product.products
    plain = replace(own, function=product_definition(own.variant))
    return replace(product, products=plain)


def check_random(own: Products, seed: int, cases: int) -> None:
    """As in float64, and a row as itself alone and in every cut."""
    for case in range(cases):
        rng = random.Random(f"{seed} {case}")
        generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
        columns, size, rows = rng.choice(COLUMNS), rng.choice(SIZES), rng.choice(ROWS)
        product, weight, bias = layer(own, generator, columns, size, rng.random() < 0.5)
        told = f"seed {seed} case {case}: {rows} rows of {size}, {columns} columns"
        x = numbers(own, generator, rows, size)
        whole = product(x)
        wanted = x.double() @ weight.double().T
        if bias is not None:
            wanted += bias.double()
        scale = x.double().abs() @ weight.double().abs().T  # of the errors of float32
        error = (
            (whole.double() - wanted).abs()
            - wanted.abs() * torch.finfo(own.dtype).eps / 2
            - scale * 1e-6
        )
        assert float(error.max()) <= 0, f"{told}: off by {float(error.max())}"
        for row in {0, rows - 1, rng.randrange(rows)}:
            assert same(product(x[row : row + 1]), whole[row : row + 1]), f"{told}: row {row}"
        first = 0
        while first < rows:
            last = min(rows, first + rng.choice((1, 3, 16, 17, 32, 40, 400)))
            assert same(product(x[first:last]), whole[first:last]), f"{told}: {first} to {last}"
            first = last


def check_every_count(own: Products) -> None:
    """Every number of rows, as in plain C++ to the bit."""
    generator = torch.Generator().manual_seed(3)
    for columns, size in ((33, 70), (48, 544)):
        product, _, _ = layer(own, generator, columns, size, bias=True)
        x = numbers(own, generator, 512, size)
        wanted = of_plain(product)(x)
        for rows in ROWS:
            assert same(product(x[-rows:]), wanted[-rows:]), f"{rows} rows of {size}"


def check_hidden_bits(own: Products) -> None:
    """As in plain C++ in every bit of the float32 sum: what rounding hides is what remains.

    Further blocks of 32 numbers take the leading bits of each sum away, twice.
    """
    generator = torch.Generator().manual_seed(4)
    for size in (32, 64, 224):
        x, weight = numbers(own, generator, 1, size), numbers(own, generator, 500, size)
        for _ in range(3):
            product = tiled(own, weight, None)
            leading = product(x)
            assert same(leading, of_plain(product)(x)), f"{x.shape[1]} numbers"
            for rows in (*range(2, 13), 17):
                assert same(product(x.repeat(rows, 1)), leading.repeat(rows, 1)), f"{rows} rows"
            one = torch.zeros((1, 32), dtype=own.dtype)
            taken = torch.zeros((500, 32), dtype=own.dtype)
            one[0, 5] = 1
            taken[:, 5] = -leading[0]
            x, weight = torch.cat((x, one), 1), torch.cat((weight, taken), 1)


def check_unusual(own: Products) -> None:
    """NaNs, infinities and subnormal numbers: as in plain C++, and in their own row only."""
    generator = torch.Generator().manual_seed(5)
    for size in (33, 96, 256):
        product, _, _ = layer(own, generator, 40, size, bias=True)
        for tiny in (False, True):
            x = numbers(own, generator, 37, size)
            if tiny:  # sums of the smallest numbers, with and without a bias
                x *= 2e-38
                if size > 33:
                    product = tiled(own, numbers(own, generator, 40, size), None)
            clean = product(x)
            assert same(clean, of_plain(product)(x)), f"tiny {tiny}"
            for value in (torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-39, 3e38):
                for row in (0, 16, 36):
                    spoilt = x.clone()
                    spoilt[row, ::3] = value
                    spoilt[row, -1] = value
                    got = product(spoilt)
                    assert same(got, of_plain(product)(spoilt)), f"{value} in row {row}"
                    for other in set(range(37)) - {row}:
                        assert same(got[other], clean[other]), f"{value} of {row} is in {other}"


def check_threads(own: Products) -> None:
    """The same bits on any number of threads; what is tiny wakes none."""
    generator = torch.Generator().manual_seed(6)
    before = torch.get_num_threads()
    try:
        for rows, columns, size, woken in (
            (1, 700, 260, 1),
            (470, 333, 300, 2),  # to copy them first
            (70, 333, 300, 2 if own.variant == AMX else 1),
            (3, 40, 40, 0),
        ):
            torch.set_num_threads(1)
            product, _, _ = layer(own, generator, columns, size)
            x = numbers(own, generator, rows, size)
            wanted = product(x)
            for threads in (2, 3, 8):
                torch.set_num_threads(threads)
                team = Team()
                shared = replace(own, parallel=team.address)
                assert same(replace(product, products=shared)(x), wanted), (
                    f"{rows} rows on {threads} threads"
                )
                assert team.sizes == [threads] * woken
    finally:
        torch.set_num_threads(before)


def check_sizes(own: Products) -> None:
    """No rows; rows that do not lie one after the other; a result larger than an L2 cache."""
    generator = torch.Generator().manual_seed(7)
    for columns in (480, 500):  # with and without aligned rows
        product, _, _ = layer(own, generator, columns, 40)
        x = numbers(own, generator, 1200, 40)
        assert same(product(x), of_plain(product)(x)), f"{columns} columns"
    product, _, _ = layer(own, generator, 20, 40)
    assert product(numbers(own, generator, 0, 40)).shape == (0, 20)
    wide = numbers(own, generator, 5, 90)
    assert same(product(wide[:, 3:43]), product(wide[:, 3:43].contiguous()))
    assert same(product(wide[:1, :40].expand(3, -1)), product(wide[:1, :40]).expand(3, -1))


def everything(own: Products, seed: int, cases: int) -> None:
    """All checks."""
    difference = products_differ(own, product_definition(own.variant))
    assert difference is None, difference
    for check in (check_every_count, check_hidden_bits, check_unusual, check_threads, check_sizes):
        check(own)
    check_random(own, seed, cases)


if __name__ == "__main__":
    tiles_refused()  # asks the system for tiles, which an object with AMX may use
    path, kind, *count = sys.argv[1:]
    for each in dtypes_of(kind):
        loaded = product_function(ctypes.CDLL(path))
        everything(Products(kind, each, loaded, 0), *(int(one) for one in count))
