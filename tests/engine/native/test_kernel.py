"""Every object of the attention kernel that this machine runs, on random problems."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from kvrelay.engine.attention.native import build
from kvrelay.engine.attention.native.arguments import KernelArguments
from kvrelay.engine.attention.native.library import (
    Function,
    definition,
    load_object,
    parallel,
    runs,
)
from kvrelay.engine.attention.native.self_test import differs
from tests.engine.native import checks
from tests.engine.native.rig import Problem, attend

FAST = [variant for variant in build.variants() if variant != build.PLAIN]


@pytest.fixture(params=FAST)
def variant(request: pytest.FixtureRequest, compiled: None) -> str:
    variant: str = request.param
    if not runs(variant):
        pytest.skip(f"not a processor for {variant}")
    return variant


@pytest.fixture
def function(variant: str) -> Function:
    return load_object(variant)


@pytest.fixture
def oracle(variant: str) -> Function:
    return definition(variant)


def test_random_problems(function: Function, oracle: Function) -> None:
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    checks.check_random(function, oracle, seed, 6)


@pytest.mark.slow
def test_many_random_problems(function: Function, oracle: Function) -> None:
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    checks.check_random(function, oracle, seed, 60)


@pytest.mark.parametrize(
    "check",
    [
        checks.check_store,
        checks.check_many_stored,
        checks.check_windows,
        checks.check_long,
        checks.check_far,
        checks.check_tiny_calls_stay_in_one_thread,
        checks.check_nothing_is_kept,
        checks.check_many_parts,
    ],
)
def test_a_property(function: Function, check: Callable[[Function], None]) -> None:
    check(function)


@pytest.mark.parametrize("check", [checks.check_isolation, checks.check_order])
def test_a_property_beside_the_plain_object(
    function: Function, oracle: Function, check: Callable[[Function, Function], None]
) -> None:
    check(function, oracle)


def test_the_plain_object_stores(compiled: None) -> None:
    plain = load_object(build.PLAIN)
    checks.check_store(plain)


def test_the_self_test_passes_and_finds_a_difference(function: Function, oracle: Function) -> None:
    assert differs(function, oracle) is None

    def wrong(arguments: KernelArguments) -> int:
        arguments.scale *= 1.0000001
        return oracle(arguments)

    assert "not the bits of the plain kernel" in (differs(wrong, oracle) or "")


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_torchs_own_threads(function: Function, threads: int) -> None:
    """The team of the OpenMP runtime that torch is linked with."""
    assert parallel() != 0
    pool = torch.randn(200, 1, 2, 16, 1, 128)
    problem = Problem(pool, 2, 0.1)
    spans = [(2900, 1, range(200)), (2000, 40, range(180))]
    query = torch.randn(41, 2, 128)
    alone = attend(function, problem, spans, query)
    assert checks.same(attend(function, problem, spans, query, threads, parallel()), alone)


def test_one_openmp_runtime_in_the_process(compiled: None) -> None:
    """In a process of its own: other tests' libraries do not count."""
    program = (
        "import re, torch\n"
        "from kvrelay.engine.attention.native.library import load_kernel\n"
        "kernel = load_kernel()\n"
        "found = set(re.findall(r'\\S*lib[a-z]*omp\\S*', open('/proc/self/maps').read()))\n"
        "print(len(found), kernel.parallel != 0)"
    )
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1 True\n", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
@pytest.mark.parametrize("variant", FAST)
def test_nothing_else_is_read_or_written(variant: str, compiled: None) -> None:
    """Pages without a right beside every block, the queries and the output: see ``guarded``."""
    if not runs(variant):
        pytest.skip(f"not a processor for {variant}")
    path = build.whole_object(variant)
    command = [sys.executable, "-m", "tests.engine.native.guarded", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout == "nothing else was touched\n"
