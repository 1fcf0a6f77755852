"""What the row kernels of every object must do; run on one by ``.. row_checks FILE SEED CASES``."""

from __future__ import annotations

import ctypes
import random
import sys
from dataclasses import dataclass

import torch

from kvrelay.engine.attention.native.build import PLAIN
from kvrelay.engine.attention.native.library import load_rows
from kvrelay.engine.attention.native.rows import RowFunctions, RowKernels, row_functions
from kvrelay.engine.attention.native.self_test import rows_differ
from tests.engine.native.checks import same
from tests.engine.native.rig import Team

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Units in the last place of the largest number, for results that are rounded two or three times.
ERRORS = {torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Rows:
    """The operands of all row kernels for some rows."""

    added: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    gated: torch.Tensor
    joint: torch.Tensor
    heads: int  # those that are rotated; one more is not
    angles: torch.Tensor
    positions: torch.Tensor
    head_weight: torch.Tensor | None

    def part(self, first: int, last: int) -> Rows:
        """The rows [first, last), copied."""
        here = slice(first, last)
        return Rows(
            self.added[here].clone(),
            self.residual[here].clone(),
            self.weight,
            self.gated[here].clone(),
            self.joint[here].clone(),
            self.heads,
            self.angles,
            self.positions[:, here].clone(),
            self.head_weight,
        )


def draw(rng: random.Random, rows: int, sizes: tuple[int, ...] = (48, 100, 7, 256)) -> Rows:
    """Random operands of a random dtype."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
    dtype = rng.choice(DTYPES)
    size, width = rng.choice(sizes), rng.choice((16, 24, 64, 128, 2, 80))
    heads = rng.choice((1, 3, 6))
    scale = rng.choice((1.0, 20.0, 0.05))

    def numbers(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    turned = torch.rand((50, width // 2), generator=generator).double() * 600
    return Rows(
        added=numbers(rows, size),
        residual=numbers(rows, size),
        weight=numbers(size),
        gated=numbers(rows, 2 * size),
        joint=numbers(rows, (heads + 1) * width),
        heads=heads,
        angles=torch.stack((turned.cos(), turned.sin()), 1).to(dtype),
        positions=torch.randint(0, 50, (1, rows), generator=generator),
        head_weight=numbers(heads, width) if rng.random() < 0.5 else None,
    )


def compute(kernels: RowKernels, given: Rows) -> dict[str, torch.Tensor]:
    """All results for copies of the operands, by name."""
    rows = len(given.residual)
    residual, joint = given.residual.clone(), given.joint.clone()
    first = kernels.norm(None, residual, given.weight, EPSILON)[:rows]
    assert same(residual, given.residual)
    normed = kernels.norm(given.added, residual, given.weight, EPSILON)[:rows]
    turned = (given.angles, given.positions, given.heads, given.head_weight)
    kernels.rotate(joint, *turned, EPSILON)
    return {
        "first": first,
        "sum": residual,
        "norm": normed,
        "rotation": joint,
        "gate": kernels.gate(given.gated)[:rows],
    }


def reference(given: Rows) -> dict[str, torch.Tensor]:
    """The results in float64."""
    total = (given.residual.double() + given.added.double()).to(given.residual.dtype).double()
    gate, up = given.gated.double().chunk(2, -1)
    width = 2 * given.angles.shape[2]
    joint = given.joint.double().view(len(given.joint), -1, width)
    turning = joint[:, : given.heads]
    if given.head_weight is not None:
        turning = _norm(turning, given.head_weight)
    cos, sin = given.angles.double()[given.positions[0]].unbind(1)
    left, right = turning.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat((left * cos - right * sin, right * cos + left * sin), -1)
    return {
        "first": _norm(given.residual.double(), given.weight),
        "sum": total,
        "norm": _norm(total, given.weight),
        "rotation": torch.cat((turned, joint[:, given.heads :]), 1).flatten(1),
        "gate": gate * torch.sigmoid(gate) * up,
    }


def _norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scale = (rows.square().mean(-1, keepdim=True) + EPSILON).rsqrt()
    return rows * scale * weight.double()


def check_random(functions: RowFunctions, seed: int, cases: int) -> None:
    """As in float64, as the plain object, in any parts, on any number of threads."""
    alone, plain = RowKernels(functions, 0), RowKernels(load_rows(PLAIN), 0)
    for case in range(cases):
        rng = random.Random(f"{seed} {case}")
        rows = rng.choice((1, 2, 5, 40))
        given = draw(rng, rows)
        told = f"seed {seed} case {case}: {given.added.dtype} {tuple(given.gated.shape)}"
        whole, oracle, wanted = compute(alone, given), compute(plain, given), reference(given)
        for name, got in whole.items():
            assert same(got, oracle[name]), f"{told}: {name} is not as in plain C++"
            limit = ERRORS[got.dtype] * max(1e-6, float(wanted[name].abs().max()))
            error = float((got.double() - wanted[name]).abs().max())
            assert error <= limit, f"{told}: {name} is off by {error}"
        first = rng.randrange(rows)
        last = rng.randint(first + 1, rows)
        for name, got in compute(alone, given.part(first, last)).items():
            assert same(got, whole[name][first:last]), f"{told}: {name} of rows {first} to {last}"


def check_threads(functions: RowFunctions) -> None:
    """Enough rows that threads are woken; few enough elsewhere that none is."""
    before = torch.get_num_threads()
    try:
        for rows in (300, 3):
            given = draw(random.Random(rows), rows, (300,))
            torch.set_num_threads(1)
            wanted = compute(RowKernels(functions, 0), given)
            for threads in (2, 3, 8):
                torch.set_num_threads(threads)
                team = Team()
                for name, got in compute(RowKernels(functions, team.address), given).items():
                    assert same(got, wanted[name]), f"{name} on {threads} threads"
                assert team.sizes == ([threads] * len(team.sizes) if rows > 3 else [])
                assert bool(team.sizes) == (rows > 3)
    finally:
        torch.set_num_threads(before)


def check_unusual(functions: RowFunctions) -> None:
    """Infinities, NaNs and subnormal numbers: as in plain C++, and in their own row only."""
    kernels, plain = RowKernels(functions, 0), RowKernels(load_rows(PLAIN), 0)
    for dtype in DTYPES:
        tiny = torch.finfo(dtype).smallest_normal
        bad = (torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, tiny, tiny / 4, -tiny / 4)
        extremes = (88.0, -88.0, -104.0, 3e4, -3e4)
        for at, value in enumerate((*bad, *extremes)):
            given = _of(random.Random(at), dtype)
            clean = compute(kernels, given)
            for each in (given.added, given.residual, given.gated, given.joint):
                each[1, ::3] = value
            spoilt, oracle = compute(kernels, given), compute(plain, given)
            for name, got in spoilt.items():
                assert same(got, oracle[name]), f"{dtype} {value}: {name}"
                for row in (0, 2):
                    assert same(got[row], clean[name][row]), f"{dtype} {value}: {name} of row {row}"


def _of(rng: random.Random, dtype: torch.dtype) -> Rows:
    while (given := draw(rng, 3)).added.dtype is not dtype:
        pass
    return given


def check_activation(functions: RowFunctions) -> None:
    """Every bfloat16 and float16, and many float32, within an error of their own size."""
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for dtype, error in ((torch.bfloat16, 0.008), (torch.float16, 0.002), (torch.float32, 2e-6)):
        x = words.view(dtype) if dtype.itemsize == 2 else torch.linspace(-20, 40, 1 << 16)
        x = x[x.isfinite() & (x > -20)]
        joint = torch.stack((x, torch.ones_like(x)), 1).contiguous()
        got = RowKernels(functions, 0).gate(joint)[:, 0].double()
        wanted = x.double() * torch.sigmoid(x.double())
        floor = torch.finfo(dtype).smallest_normal
        assert bool(((got - wanted).abs() <= error * wanted.abs() + floor).all()), dtype


def everything(functions: RowFunctions, seed: int, cases: int) -> None:
    """All checks."""
    difference = rows_differ(functions, load_rows(PLAIN))
    assert difference is None, difference
    check_threads(functions)
    check_unusual(functions)
    check_activation(functions)
    check_random(functions, seed, cases)


if __name__ == "__main__":
    everything(row_functions(ctypes.CDLL(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
