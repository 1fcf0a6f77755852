"""The kernels under Triton's interpreter, beside float64 and the decoder, and their mistakes."""

from __future__ import annotations

import random

import pytest

from tests.engine.cuda.processes import SECONDS, interpreted, needs_a_gpu, needs_triton, on_device

pytestmark = [needs_triton, pytest.mark.timeout(SECONDS + 10)]
QUICK = ("norms", "gates", "stored")
LONG = ("far", "isolated", "long", "many", "padded", "random", "rotations")
DENSE = ("llama", "llama-mha", "llama-tied", "qwen2", "qwen3", "mistral", "gpt-neox", "gpt2")
FUNCTIONS = (
    "_attend_segment",
    "_entry_of_tile",
    "_finish",
    "_merge",
    "_normed",
    "add_and_norm",
    "attend_decode",
    "attend_prefill",
    "combine_segments",
    "gate_and_up",
    "rotate_and_store",
    "store_rows",
)


def test_rows_and_stores() -> None:
    """The quick ones, for every run of the tests."""
    seed = random.randrange(1000)
    assert interpreted("checks", *QUICK, str(seed)).count("passed") == 3


def test_the_kernels_read_the_pool_where_the_worker_has_it() -> None:
    """Its tensor is head-major: a backend that takes the dimensions as they come is wrong."""
    assert "passed" in interpreted("pools", str(random.randrange(1000)))


@pytest.mark.gpu
@pytest.mark.triton
@needs_a_gpu
@pytest.mark.parametrize("check", [*QUICK, *LONG])
def test_on_a_gpu(check: str) -> None:
    """The same checks of kernels that a GPU runs; ``far`` needs 26 GB there."""
    assert "passed" in on_device("checks", check, str(random.randrange(1000)))


@pytest.mark.gpu
@pytest.mark.triton
@needs_a_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", DENSE)
def test_a_model_on_a_gpu(kind: str, dtype: str) -> None:
    seed = str(random.randrange(1000))
    assert "passed" in on_device("pools", seed)
    assert "differ by" in on_device("whole", kind, dtype, seed)


@pytest.mark.triton
def test_a_model_on_the_kernels() -> None:
    """The real runner with ``--attention-backend triton`` beside the one with SDPA."""
    assert "differ by" in interpreted("whole", "qwen3", "float32", "1")


@pytest.mark.triton
@pytest.mark.parametrize("check", LONG)
def test_in_random_order(check: str) -> None:
    """Programs in random order; the seed is printed."""
    assert "passed" in interpreted("checks", check, str(random.randrange(1000)))


@pytest.mark.triton
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", DENSE)
def test_every_dense_model(kind: str, dtype: str) -> None:
    assert "differ by" in interpreted("whole", kind, dtype, str(random.randrange(1000)))


@pytest.mark.triton
@pytest.mark.parametrize("function", FUNCTIONS)
def test_mistakes_are_found(function: str) -> None:
    """Ten one-line mistakes of each function at least."""
    found = interpreted("mutants", function)
    assert int(found.split()[0]) >= 10


def test_the_interpreter_still_needs_mending() -> None:
    """Once this fails, ``tests.engine.cuda.interpreter`` can leave a replacement out."""
    assert interpreted("interpreter").split() == ["True", "True"]


@pytest.mark.triton
@pytest.mark.parametrize(("kind", "dtype"), [("qwen3", "float32"), ("llama", "bfloat16")])
def test_replayed_steps_equal_launched_ones(kind: str, dtype: str) -> None:
    """Decode steps as graphs, padded: logits, tokens and every byte of the pool."""
    found = interpreted("replays", kind, dtype, str(random.randrange(1000)))
    assert "12 steps replayed" in found
