"""A worker that uses the cores of idle ones: only if that cannot change a bit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from kvrelay.engine.core.request import Order
from kvrelay.engine.core.updates import Ended, Token, Update
from kvrelay.engine.engine import EngineOptions
from kvrelay.engine.model.loading import load_model
from kvrelay.engine.numerics import numeric_profile
from kvrelay.process import cores
from kvrelay.rpc.security.credentials import Credentials
from kvrelay.sampling import Sampling
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.engines import native
from tests.models import tiny_model

SECONDS = 60.0


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("kind", "more"), [("llama", True), ("mixtral", False)])
def test_only_a_dense_decoder_may_have_more(tmp_path: Path, kind: str, more: bool) -> None:
    """The experts of a mixture round differently with another number of threads."""
    model = load_model(tiny_model(kind, tmp_path / kind), "float32", "cpu")
    profile_of = partial(numeric_profile, model, "auto")
    assert (native.against_more(model, 1, 4, profile_of) == "") is more


@pytest.mark.parametrize(
    ("kind", "given", "threads"),
    [
        ("llama", {}, (1, 4)),
        ("mixtral", {}, (1, 1)),
        ("llama", {"threads": 2}, (2, 2)),
        ("llama", {"shared_cores": "f"}, (1, 4)),
        ("mixtral", {"shared_cores": "f"}, (1, 1)),
        ("llama", {"shared_cores": "f", "threads": 2}, (2, 4)),
        ("llama", {"shared_cores": "f", "threads": 6}, (6, 6)),
        ("mixtral", {"shared_cores": "f", "threads": 2}, (2, 2)),
    ],
)
def test_the_threads_of_a_worker(
    tmp_path: Path, kind: str, given: dict[str, str | int], threads: tuple[int, int]
) -> None:
    path = tiny_model(kind, tmp_path / kind)
    config = WorkerConfig(model=str(path), **given)  # type: ignore[arg-type]
    model = load_model(path, "float32", "cpu")
    assert native.threads_of(config, model, 4, partial(numeric_profile, model, "auto")) == threads


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("OMP_THREAD_LIMIT", "3", "OMP_THREAD_LIMIT: 3 is less than 4 threads"),
        ("OTHER", "", "with more it has other bits"),
    ],
)
def test_a_step_has_no_more_threads_for_a_reason(
    tmp_path: Path, shares: bool, variable: str, value: str, why: str
) -> None:
    """Which is logged, and does not keep a worker from its start. OpenMP reads its limit once."""
    program = """
import logging, sys
from kvrelay.engine.model.loading import load_model
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.engines import native
logging.basicConfig(level=logging.INFO)
path, shared = sys.argv[1], sys.argv[2] or None
config = WorkerConfig(model=path, shared_cores=shared)
model = load_model(path, "float32", "cpu")
print(native.threads_of(config, model, 4, lambda threads: f"native/of/bits/{threads}"))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tiny_model("llama", tmp_path), "file" if shares else ""],
        env={**os.environ, "OMP_NUM_THREADS": "1", variable: value},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "(1, 1)\n", done.stderr
    assert f"every step has 1 of 4 threads: {why}" in done.stderr


@pytest.mark.parametrize(
    ("kind", "own", "used"), [("llama", 1, 3), ("llama", 4, 4), ("mixtral", 1, 1)]
)
def test_a_worker_says_when_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, own: int, used: int
) -> None:
    """One whose number of threads is fixed, too: the others count it."""
    monkeypatch.setattr(cores, "BYTES_A_THREAD", 1)
    monkeypatch.setattr(native, "available_cores", lambda: 3)
    shared = tmp_path / "cores"
    config = WorkerConfig(
        model=str(tiny_model(kind, tmp_path / kind, eos_token_id=None)),
        dtype="float32",
        device="cpu",
        threads=own,
        num_blocks=16,
        shared_cores=str(shared),
    )
    opened: list[int] = []
    seen = at_each_token(
        config,
        tokens=(1, 2, 3),
        count=40,
        look=lambda: (torch.get_num_threads(), shared.read_bytes()[0]),
        before=lambda: opened.append(shared.read_bytes()[0]),
    )
    assert opened == [0]
    assert set(seen) == {(used, 1)}
    assert shared.read_bytes()[0] == 0


@pytest.mark.parametrize(("given", "short"), [(None, 1), (2, 2)])
def test_a_long_step_of_a_small_model_has_more_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: int | None, short: int
) -> None:
    """Not with a number of threads that is given."""
    path = tiny_model("llama", tmp_path / "llama", eos_token_id=None)
    weights = load_model(path, "float32", "cpu").weight_bytes
    monkeypatch.setattr(cores, "BYTES_A_THREAD", 2 * weights)
    monkeypatch.setattr(native, "available_cores", lambda: 3)
    config = WorkerConfig(
        model=str(path), dtype="float32", device="cpu", num_blocks=16, threads=given
    )
    threads = at_each_token(
        config, tokens=tuple(range(3, 203)), count=3, look=torch.get_num_threads
    )
    assert threads == [given or 3, short, short]


T = TypeVar("T")


def at_each_token(
    config: WorkerConfig,
    *,
    tokens: tuple[int, ...],
    count: int,
    look: Callable[[], T],
    before: Callable[[], object] = lambda: None,
) -> list[T]:
    """What the engine's thread sees when it delivers each of ``count`` tokens."""
    ended, seen = threading.Event(), list[T]()

    def deliver(updates: Sequence[tuple[str, Update]]) -> None:
        for _, update in updates:
            if isinstance(update, Token):
                seen.append(look())
            if isinstance(update, Ended):
                ended.set()

    engine = native.open_native(config, Credentials(), deliver, EngineOptions()).engine
    try:
        before()
        engine.start()
        engine.submit(Order("a", tokens, len(tokens), count), Sampling())
        assert ended.wait(SECONDS)
    finally:
        engine.close()
    return seen
