"""Products on AMX tiles, AVX512-BF16, AVX-512, AVX2; what refuses them, what is used instead."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvrelay.engine.attention.native import build, library
from kvrelay.engine.attention.native.library import (
    FORCED_PRODUCTS,
    load_product,
    parallel,
    product_definition,
    products_of,
    runs,
    tiles_refused,
)
from kvrelay.engine.attention.native.products import NoProducts, Products, pack, tiled
from kvrelay.engine.attention.native.self_test import products_differ
from kvrelay.engine.model.loading import load_model
from kvrelay.engine.model.packed_linear import linear
from kvrelay.engine.numerics import numeric_profile
from kvrelay.errors import Rejected
from tests.engine.native import product_checks
from tests.engine.native.checks import same
from tests.models import tiny_model

BOTH = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@pytest.fixture(params=build.PRODUCT_SOURCES)
def variant(compiled: None, request: pytest.FixtureRequest) -> str:
    """Of the products that this processor can run."""
    name: str = request.param
    reason = tiles_refused() if name == build.AMX else ""
    if reason or not runs(name):
        pytest.skip(reason or f"this processor has no {name}")
    return name


@pytest.fixture(params=BOTH)
def own(variant: str, request: pytest.FixtureRequest) -> Products:
    """The products of a variant in a dtype, on one thread."""
    dtype = BOTH[request.param]
    if dtype not in product_checks.dtypes_of(variant):
        pytest.skip(f"{variant} has no {dtype}")
    return Products(variant, dtype, load_product(variant), 0)


@pytest.fixture
def fresh(compiled: None) -> Iterator[None]:
    """What a test makes of the choice is forgotten after it."""
    library._load_products.cache_clear()
    yield
    library._load_products.cache_clear()


def test_random_products(own: Products) -> None:
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    product_checks.check_random(own, seed, 100)


@pytest.mark.parametrize(
    "check",
    [
        product_checks.check_every_count,
        product_checks.check_hidden_bits,
        product_checks.check_unusual,
        product_checks.check_threads,
        product_checks.check_sizes,
    ],
)
def test_a_property(own: Products, check: Callable[[Products], None]) -> None:
    check(own)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_torchs_own_threads(own: Products, threads: int) -> None:
    before = torch.get_num_threads()
    x, weight = torch.randn(600, 520).to(own.dtype), torch.randn(999, 520).to(own.dtype)
    try:
        torch.set_num_threads(threads)
        got = tiled(replace(own, parallel=parallel()), weight, None)(x)
    finally:
        torch.set_num_threads(before)
    assert same(got, tiled(own, weight, None)(x))


def test_threads_may_have_small_stacks(compiled: None) -> None:
    """Those of the products and of the attention, in a process of its own."""
    names = [f"tests/engine/native/{name}.py" for name in ("test_products", "test_kernel")]
    command = [sys.executable, "-m", "pytest", "-q", "-k", "test_torchs_own_threads", *names]
    environ = {**os.environ, "OMP_STACKSIZE": "64k"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert " passed" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_nothing_else_is_read_or_written(variant: str) -> None:
    """In a process of its own, which a touch of another page would end."""
    path = build.whole_object(variant)
    command = [sys.executable, "-m", "tests.engine.native.product_guarded", str(path), variant]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout == "nothing else was touched\n"


@pytest.mark.parametrize("dtype", BOTH.values(), ids=BOTH)
def test_the_plain_object_is_as_in_float64(compiled: None, dtype: torch.dtype) -> None:
    """On every machine: the definition, and the order of a packed weight."""
    variants = (build.AVX512, build.AVX512_BF16) if dtype is torch.bfloat16 else (build.AVX512,)
    for variant in variants:
        plain = Products(build.PLAIN, dtype, product_definition(variant), 0)
        product_checks.check_random(plain, 1, 6)
    weight = torch.randn(33, 70).to(dtype)
    packed = pack(weight)
    if dtype is torch.bfloat16:
        assert packed.shape == (2, 3, 2, 16, 16, 2)
        assert packed[1, 2, 0, 2, 0, 1] == weight[32, 69]
    else:
        assert packed.shape == (2, 3, 2, 32, 16, 1)
        assert packed[1, 2, 0, 5, 0, 0] == weight[32, 69]
    assert packed.count_nonzero() == weight.count_nonzero()


def test_the_self_test_finds_a_wrong_product(own: Products) -> None:
    plain = product_definition(own.variant)
    assert products_differ(own, plain) is None

    def nothing(*arguments: int | None) -> int:
        return 0

    wrong = products_differ(replace(own, function=nothing), plain)
    assert "not the bits of the plain kernel" in (wrong or "")


@pytest.mark.parametrize(
    ("dtype", "other"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
    ids=BOTH,
)
def test_operands_that_do_not_fit_are_refused(
    compiled: None, dtype: torch.dtype, other: torch.dtype
) -> None:
    products = Products(build.PLAIN, dtype, load_product(build.PLAIN), 0)
    weight = torch.ones((4, 8), dtype=dtype)
    product = tiled(products, weight, None)
    wrong: list[Callable[[], object]] = [
        lambda: tiled(products, weight.to(other), None),
        lambda: tiled(products, weight, torch.ones(4, dtype=other)),
        lambda: tiled(products, weight, torch.ones(3, dtype=dtype)),
        lambda: tiled(products, weight, torch.ones((4, 2), dtype=dtype)),
        lambda: tiled(products, weight, torch.ones((), dtype=dtype)),
        lambda: tiled(products, weight[0], None),
        lambda: tiled(products, weight[:, :0], None),
        lambda: product(torch.ones((2, 8), dtype=other)),
        lambda: product(torch.ones((2, 7), dtype=dtype)),
    ]
    for call in wrong:
        with pytest.raises(ValueError, match=f"of .*{dtype}"):
            call()


def test_layers_and_profile_follow_what_is_used(
    variant: str, fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Workers with other products have profiles of their own."""
    folder = tiny_model("llama", tmp_path / "llama", torch.bfloat16)
    for name, dtype in BOTH.items():
        used = variant if dtype in product_checks.dtypes_of(variant) else build.AVX512
        layer = torch.nn.Linear(40, 24).to(dtype)
        x = torch.randn(3, 40).to(dtype)
        profiles = {}
        for forced in (variant, library.ONEDNN):
            monkeypatch.setenv(FORCED_PRODUCTS, forced)
            own = Products("", dtype, load_product(used), 0)
            wanted = tiled(own, layer.weight, layer.bias)(x)
            with torch.inference_mode():
                torch.testing.assert_close(linear(layer)(x), wanted, rtol=1e-2, atol=1e-3)
            model = load_model(folder, name, "cpu")
            assert isinstance(model.products, Products) == (forced == variant)
            profiles[forced] = numeric_profile(model, "auto", 1)
        assert f"/products-1-{used}/" in profiles[variant]
        assert "products" not in profiles[library.ONEDNN]


def test_a_refusal_of_the_system_is_said(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next best multiply instead, unless tiles were asked for."""
    monkeypatch.setattr(library, "tiles_refused", lambda: "the system refuses AMX tiles: reason")
    monkeypatch.setattr(library, "runs", lambda name: name == build.AVX512_BF16)
    monkeypatch.setattr(library, "_tested", lambda name, dtype: Products(name, dtype, int, 0))
    found = products_of(torch.bfloat16)
    assert isinstance(found, Products)
    assert found.variant == build.AVX512_BF16
    assert found.summary == "products-1-avx512bf16; amx: the system refuses AMX tiles: reason"
    monkeypatch.setenv(FORCED_PRODUCTS, "amx")
    with pytest.raises(Rejected, match=f"{FORCED_PRODUCTS}: amx cannot be used: the system"):
        products_of(torch.bfloat16)
    monkeypatch.setenv(FORCED_PRODUCTS, "mkl")
    with pytest.raises(Rejected, match="'mkl' is not one of amx, avx512bf16, avx512, avx2, onednn"):
        products_of(torch.bfloat16)
    monkeypatch.setenv(FORCED_PRODUCTS, "onednn")
    for dtype in BOTH.values():
        assert products_of(dtype) == NoProducts("KVRELAY_PRODUCTS=onednn", notable=False)


@pytest.mark.parametrize(
    ("instructions", "half", "single"),
    [
        ((build.AVX512_BF16, build.AVX512, build.AVX2), build.AVX512_BF16, build.AVX512),
        ((build.AVX512, build.AVX2), build.AVX512, build.AVX512),
        ((build.AVX2,), build.AVX2, build.AVX2),
        ((), None, None),
    ],
)
def test_without_tiles_the_best_products_are_used(
    fresh: None,
    monkeypatch: pytest.MonkeyPatch,
    instructions: tuple[str, ...],
    half: str | None,
    single: str | None,
) -> None:
    """oneDNN's on a processor that can run none of ours; there is nothing to note."""
    monkeypatch.setattr(library, "tiles_refused", lambda: library.NO_TILES)
    monkeypatch.setattr(library, "runs", lambda name: name in instructions)
    monkeypatch.setattr(library, "_tested", lambda name, dtype: Products(name, dtype, int, 0))
    for dtype, variant in ((torch.bfloat16, half), (torch.float32, single)):
        if variant:
            assert products_of(dtype) == Products(variant, dtype, int, 0)
        else:
            assert products_of(dtype) == NoProducts("this processor has no avx2", notable=False)
    why = "they are for bfloat16 and float32"
    assert products_of(torch.float16) == NoProducts(why, notable=False)


@pytest.mark.parametrize("forced", ["", *library.BFLOAT16_ONLY])
def test_beside_tiles_float32_has_the_best_vectors(
    fresh: None, monkeypatch: pytest.MonkeyPatch, forced: str
) -> None:
    monkeypatch.setenv(FORCED_PRODUCTS, forced)
    monkeypatch.setattr(library, "tiles_refused", lambda: "")
    monkeypatch.setattr(library, "runs", lambda name: True)
    monkeypatch.setattr(library, "_tested", lambda name, dtype: Products(name, dtype, int, 0))
    used = forced or build.AMX
    assert products_of(torch.bfloat16) == Products(used, torch.bfloat16, int, 0)
    assert products_of(torch.float32) == Products(build.AVX512, torch.float32, int, 0)


@pytest.mark.parametrize("name", build.PRODUCT_SOURCES)
def test_what_this_processor_cannot_run_is_refused(
    fresh: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(library, "runs", lambda name: False)
    monkeypatch.setattr(library, "tiles_refused", lambda: library.NO_TILES)
    monkeypatch.setenv(FORCED_PRODUCTS, name)
    for dtype in product_checks.dtypes_of(name):
        with pytest.raises(Rejected, match=f"{name} cannot be used: this processor has no {name}"):
            products_of(dtype)


@pytest.mark.parametrize("dtype", BOTH.values(), ids=BOTH)
def test_all_other_products_have_the_same_bits(compiled: None, dtype: torch.dtype) -> None:
    """All but those on AVX512-BF16, which add in another order."""
    here = [
        Products(name, dtype, load_product(name), 0)
        for name in build.PRODUCT_SOURCES
        if runs(name) and dtype in product_checks.dtypes_of(name) and name != build.AVX512_BF16
    ]
    if len(here) < 2:
        pytest.skip("needs a processor that runs two")
    first, *others = here
    assert [products_differ(one, first.function) for one in others] == [None] * len(others)


def test_what_was_not_compiled_is_not_used(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any object attention says so; a compiler may not know some instructions."""

    def missing(name: str) -> library.Function:
        raise library.NoKernel(f"{name}: not compiled")

    monkeypatch.setattr(library, "tiles_refused", lambda: missing(build.PLAIN))
    assert products_of(torch.bfloat16) == NoProducts("plain: not compiled", notable=False)
    library._load_products.cache_clear()
    monkeypatch.setattr(library, "tiles_refused", lambda: "")
    monkeypatch.setattr(library, "runs", lambda name: True)
    monkeypatch.setattr(library, "load_product", missing)
    wanted = "; ".join(f"{name}: {name}: not compiled" for name in build.PRODUCT_SOURCES)
    assert products_of(torch.bfloat16) == NoProducts(wanted)


@pytest.mark.parametrize("why", ["other bits", "not compiled"])
def test_the_next_best_are_used_instead(
    fresh: None, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def tested(name: str, dtype: torch.dtype) -> Products | str:
        return why if name == build.AMX else Products(name, dtype, int, 1)

    monkeypatch.setattr(library, "tiles_refused", lambda: "")
    monkeypatch.setattr(library, "runs", lambda name: True)
    monkeypatch.setattr(library, "_tested", tested)
    wanted = Products(build.AVX512_BF16, torch.bfloat16, int, 1, (f"amx: {why}",))
    assert products_of(torch.bfloat16) == wanted


def test_an_object_that_fails_its_test_is_not_used(
    variant: str, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCED_PRODUCTS, variant)
    monkeypatch.setattr(library, "products_differ", lambda products, oracle: "other bits")
    assert library._tested(variant, torch.bfloat16) == "other bits"
    with pytest.raises(Rejected, match=f"{variant} cannot be used: other bits"):
        products_of(torch.bfloat16)
    library._load_products.cache_clear()
    monkeypatch.setattr(library, "products_differ", lambda products, oracle: None)
    monkeypatch.setattr(library, "parallel", lambda: 0)
    with pytest.raises(Rejected, match=f"{variant} cannot be used: torch has no GOMP_parallel"):
        products_of(torch.bfloat16)


def test_a_forked_process_has_tiles(own: Products) -> None:
    """A worker is forked from a process that may have asked for them before."""
    x, weight = torch.randn(3, 64).to(own.dtype), torch.randn(40, 64).to(own.dtype)
    product = tiled(own, weight, None)
    wanted = product(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if same(product(x), wanted) else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
