"""The conditions of other libraries' attention, each by itself, and the signature of torch's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvrelay.engine.cuda.alternatives import AttentionShape, flash_attn_reasons, varlen_reasons

GOOD = AttentionShape(torch.bfloat16, 16, 8, 128, 256, (8, 0))
BAD = {
    "dtype float32": replace(GOOD, dtype=torch.float32),
    "head dim 264": replace(GOOD, head_dim=264),
    "head dim 20": replace(GOOD, head_dim=20),
    "16 heads are no multiple of 3": replace(GOOD, kv_heads=3),
    "block size 16": replace(GOOD, block_size=16),
    "block size 384": replace(GOOD, block_size=384),
    "capability 7.5": replace(GOOD, capability=(7, 5)),
    "sinks": replace(GOOD, sinks=True),
}


def prefill(q: int, block_table: int, causal: int, softmax_scale: int, window_size: int) -> None:
    """The arguments of ``flash_attn_varlen_func`` that matter."""


def decode(
    q: int,
    block_table: int,
    cache_seqlens: int,
    causal: int,
    num_splits: int,
    softmax_scale: int,
    window_size: int,
) -> None:
    """The arguments of ``flash_attn_with_kvcache`` that matter."""


def old(q: int, k: int, causal: int) -> None:
    """A version without pages."""


def _varlen() -> object:
    module = pytest.importorskip("torch.nn.attention.varlen", reason="torch has no varlen_attn")
    return module.varlen_attn


def test_the_varlen_attention_of_this_torch_has_every_argument() -> None:
    function = _varlen()
    assert callable(function)
    if tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 13):
        pytest.skip("varlen_attn takes block tables since torch 2.13")
    assert varlen_reasons(GOOD, function) == ()
    assert varlen_reasons(replace(GOOD, block_size=512, head_dim=64, heads=8), function) == ()


@pytest.mark.parametrize("reason", BAD)
def test_each_condition_is_a_reason(reason: str) -> None:
    function = _varlen()
    assert callable(function)
    for found in (
        varlen_reasons(BAD[reason], function),
        flash_attn_reasons(BAD[reason], prefill, decode),
    ):
        assert sum(reason in one for one in found) == 1, found


def test_missing_arguments_are_named() -> None:
    assert flash_attn_reasons(GOOD, prefill, decode) == ()
    found = flash_attn_reasons(GOOD, old, decode)
    assert found == (
        "flash_attn_varlen_func has no argument block_table, softmax_scale, window_size",
    )
    capped = replace(GOOD, softcap=True)
    assert len(flash_attn_reasons(capped, prefill, decode)) == 2
    assert varlen_reasons(capped, old)[-1] == "varlen_attn has no soft cap"
