"""The products on AMX tiles, AVX-512 and AVX2, what refuses them, and what is used instead."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvrelay.engine.attention.native import build, library
from kvrelay.engine.attention.native.library import (
    FORCED_PRODUCTS,
    load_product,
    load_products,
    parallel,
    runs,
    tiles_refused,
)
from kvrelay.engine.attention.native.products import (
    NoProducts,
    ProductFunction,
    Products,
    pack,
    tiled,
)
from kvrelay.engine.attention.native.self_test import products_differ
from kvrelay.engine.attention.pool import DTYPES
from kvrelay.engine.model.loading import load_model
from kvrelay.engine.model.packed_linear import linear
from kvrelay.engine.numerics import numeric_profile
from kvrelay.errors import Rejected
from tests.engine.native import product_checks
from tests.engine.native.checks import same
from tests.models import tiny_model


@pytest.fixture(params=build.PRODUCT_SOURCES)
def variant(compiled: None, request: pytest.FixtureRequest) -> str:
    """Of the products that this processor can run."""
    name: str = request.param
    reason = tiles_refused() if name == build.AMX else ""
    if reason or not runs(name):
        pytest.skip(reason or f"this processor has no {name}")
    return name


@pytest.fixture
def function(variant: str) -> ProductFunction:
    return load_product(variant)


@pytest.fixture
def fresh(compiled: None) -> Iterator[None]:
    """What a test makes of the choice is forgotten after it."""
    library._load_products.cache_clear()
    yield
    library._load_products.cache_clear()


def test_random_products(function: ProductFunction) -> None:
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    product_checks.check_random(function, seed, 100)


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
def test_a_property(function: ProductFunction, check: Callable[[ProductFunction], None]) -> None:
    check(function)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_torchs_own_threads(function: ProductFunction, threads: int) -> None:
    before = torch.get_num_threads()
    x, weight = torch.randn(600, 520).bfloat16(), torch.randn(999, 520).bfloat16()
    try:
        torch.set_num_threads(threads)
        got = tiled(Products("", function, parallel()), weight, None)(x)
    finally:
        torch.set_num_threads(before)
    assert same(got, tiled(Products("", function, 0), weight, None)(x))


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_nothing_else_is_read_or_written(variant: str) -> None:
    """In a process of its own, which a touch of another page would end."""
    path = build.FOLDER / build.object_name(variant)
    command = [sys.executable, "-m", "tests.engine.native.product_guarded", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout == "nothing else was touched\n"


def test_the_plain_object_is_as_in_float64(compiled: None) -> None:
    """On every machine: the definition, and the order of a packed weight."""
    product_checks.check_random(load_product(build.PLAIN), 1, 6)
    weight = torch.randn(33, 70).bfloat16()
    packed = pack(weight)
    assert packed.shape == (2, 3, 2, 16, 16, 2)
    assert packed[1, 2, 0, 2, 0, 1] == weight[32, 69]
    assert packed.count_nonzero() == weight.count_nonzero()


def test_the_self_test_finds_a_wrong_product(function: ProductFunction) -> None:
    plain = load_product(build.PLAIN)
    assert products_differ(function, plain) is None

    def nothing(*arguments: int | None) -> int:
        return 0

    assert "not the bits of the plain kernel" in (products_differ(nothing, plain) or "")


def test_operands_that_do_not_fit_are_refused(compiled: None) -> None:
    products = Products(build.PLAIN, load_product(build.PLAIN), 0)
    weight = torch.ones(4, 8).bfloat16()
    product = tiled(products, weight, None)
    wrong: list[Callable[[], object]] = [
        lambda: tiled(products, weight.float(), None),
        lambda: tiled(products, weight, torch.ones(4)),
        lambda: tiled(products, weight, torch.ones(3).bfloat16()),
        lambda: tiled(products, weight[:, :0], None),
        lambda: product(torch.ones(2, 8)),
        lambda: product(torch.ones(2, 7).bfloat16()),
    ]
    for call in wrong:
        with pytest.raises(ValueError, match="bfloat16"):
            call()


def test_layers_and_profile_follow_what_is_used(
    variant: str, fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Workers with other products have profiles of their own; in float32 there is one."""
    layer = torch.nn.Linear(40, 24).bfloat16()
    x = torch.randn(3, 40).bfloat16()
    folder = tiny_model("llama", tmp_path / "llama", DTYPES["bfloat16"])
    profiles = {}
    for name in (variant, library.ONEDNN):
        monkeypatch.setenv(FORCED_PRODUCTS, name)
        own = tiled(Products("", load_product(variant), 0), layer.weight, layer.bias)(x)
        with torch.inference_mode():
            torch.testing.assert_close(linear(layer)(x), own, rtol=1e-2, atol=1e-3)
        for dtype in ("bfloat16", "float32"):
            model = load_model(folder, dtype, "cpu")
            assert isinstance(model.products, Products) == ((name, dtype) == (variant, "bfloat16"))
            profiles[name, dtype] = numeric_profile(model, "auto", 1)
    assert f"/products-1-{variant}/" in profiles[variant, "bfloat16"]
    assert "products" not in profiles["onednn", "bfloat16"]
    assert profiles[variant, "float32"] == profiles["onednn", "float32"]


def test_a_refusal_of_the_system_is_said(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """oneDNN multiplies instead, unless tiles were asked for."""
    monkeypatch.setattr(library, "tiles_refused", lambda: "the system refuses AMX tiles: reason")
    assert load_products() == NoProducts("the system refuses AMX tiles: reason")
    monkeypatch.setenv(FORCED_PRODUCTS, "amx")
    with pytest.raises(Rejected, match=f"{FORCED_PRODUCTS}: amx cannot be used: the system"):
        load_products()
    monkeypatch.setenv(FORCED_PRODUCTS, "mkl")
    with pytest.raises(Rejected, match="'mkl' is not one of amx, avx512, avx2, onednn"):
        load_products()
    monkeypatch.setenv(FORCED_PRODUCTS, "onednn")
    assert load_products() == NoProducts("KVRELAY_PRODUCTS=onednn", notable=False)


@pytest.mark.parametrize(
    ("instructions", "variant"),
    [
        ((build.AVX512_BF16, build.AVX512, build.AVX2), None),
        ((build.AVX512, build.AVX2), build.AVX512),
        ((build.AVX2,), build.AVX2),
        ((), None),
    ],
)
def test_without_tiles_the_best_products_are_used(
    fresh: None,
    monkeypatch: pytest.MonkeyPatch,
    instructions: tuple[str, ...],
    variant: str | None,
) -> None:
    """oneDNN's on a processor that multiplies bfloat16; there is nothing to note."""
    monkeypatch.setattr(library, "tiles_refused", lambda: library.NO_TILES)
    monkeypatch.setattr(library, "runs", lambda name: name in instructions)
    monkeypatch.setattr(library, "_tested", lambda name: Products(name, int, 0))
    if variant:
        assert load_products() == Products(variant, int, 0)
    else:
        reason = library.NO_TILES if instructions else "this processor has no avx2"
        assert load_products() == NoProducts(reason, notable=False)


@pytest.mark.parametrize("name", [build.AVX512, build.AVX2])
def test_what_this_processor_cannot_run_is_refused(
    fresh: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(library, "runs", lambda name: False)
    monkeypatch.setenv(FORCED_PRODUCTS, name)
    with pytest.raises(Rejected, match=f"{name} cannot be used: this processor has no {name}"):
        load_products()


def test_all_products_have_the_same_bits(compiled: None) -> None:
    """A worker's products do not depend on which of them it has."""
    here = [name for name in build.PRODUCT_SOURCES if runs(name)]
    if len(here) < 2:
        pytest.skip("needs a processor that runs two")
    first, *others = (load_product(name) for name in here)
    assert [products_differ(other, first) for other in others] == [None] * len(others)


def test_what_was_not_compiled_is_not_used(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any object attention says so; a compiler may know all but AMX."""

    def missing(name: str) -> library.Function:
        raise library.NoKernel(f"{name}: not compiled")

    monkeypatch.setattr(library, "tiles_refused", lambda: missing(build.PLAIN))
    assert load_products() == NoProducts("plain: not compiled", notable=False)
    library._load_products.cache_clear()
    monkeypatch.setattr(library, "tiles_refused", lambda: "")
    monkeypatch.setattr(library, "load_product", missing)
    assert load_products() == NoProducts("amx: not compiled")


def test_an_object_that_fails_its_test_is_not_used(
    variant: str, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCED_PRODUCTS, variant)
    monkeypatch.setattr(library, "products_differ", lambda function, oracle: "other bits")
    assert library._tested(variant) == NoProducts("other bits")
    with pytest.raises(Rejected, match=f"{variant} cannot be used: other bits"):
        load_products()
    library._load_products.cache_clear()
    monkeypatch.setattr(library, "products_differ", lambda function, oracle: None)
    monkeypatch.setattr(library, "parallel", lambda: 0)
    with pytest.raises(Rejected, match=f"{variant} cannot be used: torch has no GOMP_parallel"):
        load_products()


def test_a_forked_process_has_tiles(function: ProductFunction) -> None:
    """A worker is forked from a process that may have asked for them before."""
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    product = tiled(Products("", function, 0), weight, None)
    wanted = product(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if same(product(x), wanted) else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
