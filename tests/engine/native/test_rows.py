"""The row kernels of every object that this machine runs, and what refuses them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from kvrelay.engine.attention.native import build
from kvrelay.engine.attention.native.library import load_rows, runs
from kvrelay.engine.attention.native.rows import RowFunctions, RowKernels
from kvrelay.engine.attention.native.self_test import rows_differ
from tests.engine.native import row_checks


@pytest.fixture(params=build.variants())
def functions(request: pytest.FixtureRequest, compiled: None) -> RowFunctions:
    variant: str = request.param
    if not runs(variant):
        pytest.skip(f"not a processor for {variant}")
    return load_rows(variant)


def test_random_rows(functions: RowFunctions) -> None:
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    row_checks.check_random(functions, seed, 60)


@pytest.mark.parametrize(
    "check",
    [row_checks.check_threads, row_checks.check_unusual, row_checks.check_activation],
)
def test_a_property_of_rows(functions: RowFunctions, check: Callable[[RowFunctions], None]) -> None:
    check(functions)


@pytest.mark.parametrize("name", ["norm", "rotate", "gate"])
def test_the_self_test_finds_a_wrong_row(functions: RowFunctions, name: str) -> None:
    """Of each kernel: one that does nothing."""
    plain = load_rows(build.PLAIN)
    assert rows_differ(functions, plain) is None
    changed = {each: getattr(functions, each) for each in ("norm", "rotate", "gate")}
    changed[name] = lambda *arguments: 0
    assert "not the bits of the plain kernel" in (rows_differ(RowFunctions(**changed), plain) or "")


def test_operands_that_do_not_fit_are_refused(functions: RowFunctions) -> None:
    kernels = RowKernels(functions, 0)
    rows, weight = torch.zeros(3, 16), torch.ones(16)
    joint, angles, positions = torch.zeros(3, 32), torch.zeros(9, 2, 8), torch.zeros(1, 3).long()
    wrong: list[Callable[[], object]] = [
        lambda: kernels.norm(None, rows, weight[:8], 0.0),
        lambda: kernels.norm(None, rows.T, torch.ones(3), 0.0),
        lambda: kernels.norm(rows[:2], rows, weight, 0.0),
        lambda: kernels.norm(rows.bfloat16(), rows, weight, 0.0),
        lambda: kernels.rotate(joint[:2], angles, positions, 2, None, 0.0),
        lambda: kernels.rotate(joint, angles, positions, 3, None, 0.0),
        lambda: kernels.rotate(joint, angles.half(), positions, 2, None, 0.0),
        lambda: kernels.rotate(joint, angles, positions, 2, weight, 0.0),
        lambda: kernels.gate(torch.zeros(2, 7)),
        lambda: kernels.gate(torch.zeros(8, 2).T),
    ]
    for call in wrong:
        with pytest.raises(ValueError, match="fit"):
            call()
