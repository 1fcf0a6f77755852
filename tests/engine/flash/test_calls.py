"""The calls of FlashAttention: their signatures, what we pass, and that mistakes would be seen."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.attention.varlen import varlen_attn

from kvrelay.engine.attention import flash_backend, flash_calls
from kvrelay.engine.attention.batch import pack
from kvrelay.engine.attention.flash_backend import FlashBackend
from kvrelay.engine.attention.flash_calls import FlashEntries, VarlenCalls
from kvrelay.engine.attention.pool import KVPool, PoolShape
from kvrelay.engine.core.updates import Work
from kvrelay.engine.cuda.upload import StepUpload
from tests.engine.flash import standins
from tests.engine.flash.checks import LIBRARIES, Modules, random_batches, random_options
from tests.engine.flash.mutants import BACKEND, CALLS, survives

REAL = Modules(flash_calls, flash_backend)
CHECKS = {"batches": random_batches, "options": random_options}
SHAPE = PoolShape(6, 2, 256, 2, 16, "float32")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("check", CHECKS)
def test_random_batches(library: str, check: str) -> None:
    """Beside SDPA and float64, in pools that are NaN wherever no position lies."""
    for seed in (1, 2, random.randrange(1000)):
        print(f"seed {seed}")
        CHECKS[check](REAL, library, seed)


def test_the_stand_in_of_varlen_attn_has_the_arguments_of_this_torch() -> None:
    """Names, kinds and defaults: what the stand-in takes, the real one takes."""
    mine, real = (
        inspect.signature(each).parameters for each in (standins.varlen_attn, varlen_attn)
    )
    assert [(p.name, p.kind, p.default) for p in mine.values()] == [
        (p.name, p.kind, p.default) for p in real.values()
    ]


def _on_meta(real: Callable[..., object]) -> Callable[..., torch.Tensor]:
    """The real function on tensors without data, with what is passed in every other way."""

    def call(*given: object, **named: object) -> torch.Tensor:
        there = [each.to("meta") if isinstance(each, torch.Tensor) else each for each in given]
        options = {
            name: each.to("meta") if isinstance(each, torch.Tensor) else each
            for name, each in named.items()
        }
        made = real(*there, **options)
        assert isinstance(made, torch.Tensor)
        assert made.is_meta
        return torch.zeros(made.shape, dtype=made.dtype)

    return call


def test_the_real_varlen_attn_takes_our_arguments() -> None:
    """Its operator checks their types; on tensors without data it computes nothing."""
    pool = KVPool(SHAPE)
    backend = FlashBackend(pool, VarlenCalls(_on_meta(varlen_attn)))
    works = [Work([0] * 300, 299, 1, [3, 1], 1, None), Work([0] * 40, 0, 40, [5], 1, None)]
    query, key = torch.randn(41, 4, 16), torch.randn(41, 2, 16)
    out = backend.step(pack(works, 256)).attend(1, query, key, key, None)
    assert out.shape == query.shape


def test_a_step_is_one_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of all groups and of the sampling, in one copy."""
    sent: list[int] = []
    own = StepUpload.send

    def send(upload: StepUpload, parts: Sequence[NDArray[np.int32]]) -> list[torch.Tensor]:
        sent.append(len(parts))
        return own(upload, parts)

    monkeypatch.setattr(StepUpload, "send", send)
    backend = FlashBackend(KVPool(SHAPE), VarlenCalls(standins.varlen_attn))
    works = [Work([0] * 300, 299, 1, [3, 1], 1, None), Work([0] * 40, 0, 40, [5], 1, None)]
    backend.step(pack(works, 256))
    assert len(sent) == 1


def test_what_leaves_the_pool_is_refused() -> None:
    backend = FlashBackend(KVPool(SHAPE), VarlenCalls(standins.varlen_attn))
    work = Work([0] * 300, 299, 1, [3, 6], 1, None)
    with pytest.raises(IndexError, match="leaves the pool of 6"):
        backend.step(pack([work], 256))
    step = backend.step(pack([Work([0] * 9, 0, 9, [5], 1, None)], 256))
    good = [torch.zeros(9, 4, 16), torch.zeros(9, 2, 16), torch.zeros(9, 2, 16)]
    step.attend(1, good[0], good[1], good[2], None)
    for place, wrong in (
        (0, torch.zeros(8, 4, 16)),
        (0, torch.zeros(9, 3, 16)),
        (0, torch.zeros(9, 4, 16, dtype=torch.bfloat16)),
        (1, torch.zeros(9, 1, 16)),
        (2, torch.zeros(9, 2, 8)),
    ):
        given = [wrong if place == number else each for number, each in enumerate(good)]
        with pytest.raises(ValueError, match="not of this pool"):
            step.attend(1, given[0], given[1], given[2], None)
    with pytest.raises(ValueError, match="layer 2"):
        step.attend(2, good[0], good[1], good[2], None)


def test_the_stand_ins_leave_out_what_a_kernel_would() -> None:
    """Rows beyond the largest number of rows; a call that is split."""
    pool = KVPool(PoolShape(1, 1, 256, 1, 8, "float32"))
    keys, values = pool.by_position[:, 0].unbind(1)
    counts = torch.tensor([0, 5], dtype=torch.int32)
    lengths, table = counts[1:], torch.zeros(1, 1, dtype=torch.int32)
    query = torch.randn(5, 1, 8)
    for most, computed in ((5, 5), (3, 3)):
        entries = FlashEntries(counts, counts, lengths, table, most, 5)
        out = VarlenCalls(standins.varlen_attn).prefill(query, keys, values, entries, 1.0)
        assert int((~out.isnan().any(-1)).sum()) == computed
    with pytest.raises(AssertionError, match="more splits"):
        standins.varlen_attn(query, keys, values, counts, counts, 5, 5)


@pytest.mark.parametrize(
    ("module", "name"),
    [*(("calls", name) for name in CALLS), *(("backend", name) for name in BACKEND)],
)
def test_mistakes_are_found(module: str, name: str) -> None:
    assert not survives(module, name)
