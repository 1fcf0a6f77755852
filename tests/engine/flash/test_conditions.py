"""The conditions of FlashAttention's calls, each by itself, and what a user is told of them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from kvrelay.engine.attention.choice import choose_attention
from kvrelay.engine.attention.flash_calls import NoFlash, open_flash_attn, open_varlen
from kvrelay.engine.attention.pool import KVPool, PoolShape
from kvrelay.engine.cuda.arguments import PLAIN, AttentionOptions
from kvrelay.engine.cuda.flash_conditions import (
    device_reasons,
    flash_attn_reasons,
    varlen_reasons,
)
from kvrelay.errors import Rejected
from tests.engine.flash import standins

GOOD = PoolShape(2, 3, 256, 2, 16, "bfloat16")
SINKS = AttentionOptions(sinks=torch.zeros(4))
CAPPED = AttentionOptions(softcap=30.0)


def pool(
    size: int = 256, heads: int = 2, width: int = 16, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """[block, layer, k|v, position, kv head, head dim], head-major."""
    return torch.empty((2, heads, 3, 2, size, width), dtype=dtype).permute(0, 2, 3, 4, 1, 5)


def shifted(by: int) -> torch.Tensor:
    """A pool that begins elsewhere."""
    flat = torch.empty(2 * 2 * 3 * 2 * 256 * 16 + by, dtype=torch.bfloat16)[by:]
    return flat.view(2, 2, 3, 2, 256, 16).permute(0, 2, 3, 4, 1, 5)


BAD = {
    "dtype float32: FlashAttention computes float16 and bfloat16": pool(dtype=torch.float32),
    "head dim 264: must be a multiple of 8 up to 256": pool(width=264),
    "head dim 20: must be a multiple of 8 up to 256": pool(width=20),
    "block size 16: must be a multiple of 256 (--block-size 256)": pool(size=16),
    "block size 384: must be a multiple of 256 (--block-size 256)": pool(size=384),
    "the numbers of a head lie 256 apart: they must be neighbours": pool(16, width=256).transpose(
        3, 5
    ),
    "the pool begins at number 4: must be a multiple of 8": shifted(4),
}


def _old(q: int, k: int, causal: int) -> None:
    """A version without pages."""


@pytest.mark.parametrize("width", [8, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_pool_of_a_worker_has_legal_strides(width: int, dtype: torch.dtype) -> None:
    """Head-major, in this torch and in flash_attn 2.8.3: nothing is against it."""
    for size in (256, 512):
        made = pool(size, width=width, dtype=dtype)
        assert made.stride() != made.contiguous().stride()
        assert varlen_reasons(made, PLAIN, varlen_attn) == ()
        real = standins.flash_attn_varlen_func, standins.flash_attn_with_kvcache
        assert flash_attn_reasons(made, PLAIN, *real) == ()
    assert KVPool(GOOD).by_position.stride() == pool().stride()


@pytest.mark.parametrize("reason", BAD)
def test_each_condition_is_a_reason(reason: str) -> None:
    real = standins.flash_attn_varlen_func, standins.flash_attn_with_kvcache
    for found in (
        varlen_reasons(BAD[reason], PLAIN, varlen_attn),
        flash_attn_reasons(BAD[reason], PLAIN, *real),
    ):
        assert reason in found


@pytest.mark.parametrize(
    ("place", "name"),
    [*enumerate(("block", "layer", "K or V", "position", "kv head"))],
)
def test_every_stride_is_looked_at(place: int, name: str) -> None:
    strides = [1 << 16, 1 << 14, 1 << 13, 32, 16, 1]
    strides[place] += 4
    made = torch.empty_strided((2, 2, 2, 256, 2, 16), strides, dtype=torch.bfloat16)
    assert varlen_reasons(made, PLAIN, varlen_attn) == (
        f"stride {strides[place]} of a {name}: must be a multiple of 8 numbers",
    )


def test_missing_arguments_are_named() -> None:
    real = standins.flash_attn_varlen_func, standins.flash_attn_with_kvcache
    assert flash_attn_reasons(pool(), PLAIN, _old, real[1]) == (
        "flash_attn_varlen_func has no argument block_table, softmax_scale, window_size",
    )
    (found,) = flash_attn_reasons(pool(), CAPPED, real[0], _without(real[1], "softcap"))
    assert found == "flash_attn_with_kvcache has no argument softcap"
    for name in ("block_table", "enable_gqa", "num_splits", "scale", "seqused_k", "window_size"):
        (found,) = varlen_reasons(pool(), PLAIN, _without(varlen_attn, name))
        assert found == f"varlen_attn of this torch has no argument {name}"


def _without(function: Callable[..., object], name: str) -> Callable[..., object]:
    """A version of a function that lacks an argument."""

    def older() -> None:
        """Only its signature is read."""

    known = inspect.signature(function)
    kept = [parameter for parameter in known.parameters.values() if parameter.name != name]
    older.__signature__ = known.replace(parameters=kept)  # type: ignore[attr-defined]
    return older


def test_what_the_calls_cannot_do() -> None:
    real = standins.flash_attn_varlen_func, standins.flash_attn_with_kvcache
    assert varlen_reasons(pool(), CAPPED, varlen_attn) == ("varlen_attn has no soft cap",)
    assert flash_attn_reasons(pool(), CAPPED, *real) == ()
    for found in (
        varlen_reasons(pool(), SINKS, varlen_attn),
        flash_attn_reasons(pool(), SINKS, *real),
    ):
        assert found == ("FlashAttention 2 has no attention sinks",)


def test_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"capability": (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found["capability"])
    cuda = torch.device("cuda")
    assert device_reasons(torch.device("cpu")) == (
        "its kernels run on a CUDA device, and this worker computes on cpu",
    )
    assert device_reasons(cuda) == ("it needs compute capability 8.0, and the device has 7.5",)
    found["capability"] = (12, 0)
    assert device_reasons(cuda) == ()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    (reason,) = device_reasons(cuda)
    assert "built for ROCm" in reason


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU were a device for the kernels, and torch were built with them."""
    monkeypatch.setattr("kvrelay.engine.attention.flash_calls.device_reasons", lambda device: ())
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)


def test_varlen_is_opened_where_it_can_be_used(any_device: None) -> None:
    assert choose_attention("varlen", KVPool(GOOD)).backend.profile == "varlen-1"
    with pytest.raises(Rejected) as caught:
        choose_attention("varlen", KVPool(PoolShape(2, 3, 16, 2, 16, "float32")))
    assert str(caught.value) == (
        "attention_backend: varlen cannot be used: dtype float32: FlashAttention computes float16"
        " and bfloat16; block size 16: must be a multiple of 256 (--block-size 256)"
    )


def test_a_torch_without_the_kernels(any_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    with pytest.raises(NoFlash, match="was built without FlashAttention"):
        open_varlen(KVPool(GOOD))
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    with pytest.raises(NoFlash, match="has no varlen_attn"):
        open_varlen(KVPool(GOOD))


def test_on_the_cpu_both_are_refused() -> None:
    """With every reason at once, before anything is computed."""
    for name in ("varlen", "flash_attn"):
        with pytest.raises(Rejected, match=f"attention_backend: {name} cannot be used: "):
            choose_attention(name, KVPool(GOOD))
    with pytest.raises(NoFlash, match="this worker computes on cpu"):
        open_varlen(KVPool(GOOD))


def test_the_package_flash_attn(any_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absent, another package of that name, and one that can be used."""
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    with pytest.raises(NoFlash, match=r"cannot be imported: .*flash_attn_varlen_func"):
        open_flash_attn(KVPool(GOOD))
    monkeypatch.setitem(sys.modules, "flash_attn", standins.flash_attn_module())
    chosen = choose_attention("flash_attn", KVPool(GOOD))
    assert chosen.backend.profile == "flash_attn-1-2.8.3.post2"
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(NoFlash, match="the package flash_attn is not installed"):
        open_flash_attn(KVPool(GOOD))
