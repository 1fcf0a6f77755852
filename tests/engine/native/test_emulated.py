"""Whole models on the object for AMX, on a processor without: its tiles are emulated.

``test_mutants.py`` has the checks of attention and products alone.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvrelay.engine.attention.native import build, library
from kvrelay.engine.attention.native.forward import forward_function
from kvrelay.engine.attention.native.products import Products
from kvrelay.engine.model.loading import load_model
from tests.engine.native import forward_checks
from tests.engine.native.emulated import compile_object, need
from tests.engine.torch.test_batch_invariance import check, check_threads
from tests.models import tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, compiled: None) -> Path:
    need(build.AMX)
    if not library.tiles_refused():
        pytest.skip("this processor has AMX: the other tests use it")
    sources = [build.FOLDER / name for name in (*build.SOURCES, build.PRODUCT_SOURCES[build.AMX])]
    return compile_object(tmp_path_factory.mktemp("amx") / "amx.so", build.AMX, sources)


@pytest.fixture(autouse=True)
def amx(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process finds AMX, and the object."""
    open_object, runs = library.open_object, library.runs

    def opened(variant: str, folder: Path = build.FOLDER) -> ctypes.CDLL:
        return ctypes.CDLL(str(path)) if variant == build.AMX else open_object(variant, folder)

    monkeypatch.setattr(library, "open_object", opened)
    monkeypatch.setattr(library, "runs", lambda variant: variant == build.AMX or runs(variant))
    monkeypatch.setattr(library, "tiles_refused", lambda: "")
    library._load.cache_clear()
    library._load_products.cache_clear()
    assert library.load_kernel().variant == build.AMX
    yield
    library._load.cache_clear()
    library._load_products.cache_clear()


def test_it_passes_the_test_at_load() -> None:
    kernel, products = library.load_kernel(), library.products_of(torch.bfloat16)
    assert isinstance(products, Products)
    assert (kernel.variant, products.variant) == (build.AMX, build.AMX)
    assert kernel.passed_over == products.passed_over == ()


def test_a_forward_pass_in_one_call() -> None:
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    function = forward_function(library.open_object(build.PLAIN))
    forward_checks.check_random(function, seed, 60)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_models_however_cut(tmp_path: Path, kind: str) -> None:
    loaded = load_model(tiny_model(kind, tmp_path / kind, torch.bfloat16), "bfloat16", "cpu")
    assert isinstance(loaded.products, Products)
    assert loaded.products.variant == build.AMX
    check(loaded, 16, 1, random.randrange(1 << 31), "native")


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_models_on_one_to_eight_threads(tmp_path: Path, kind: str) -> None:
    check_threads(kind, "bfloat16", "native", tmp_path, 1)
