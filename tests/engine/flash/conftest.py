"""The stand-ins in place of the libraries."""

from __future__ import annotations

import sys

import pytest

from tests.engine.flash import standins


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any device and in any dtype: no condition is looked at."""
    calls = "kvrelay.engine.attention.flash_calls"
    monkeypatch.setattr(f"{calls}._refuse", lambda reasons: None)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", standins.varlen_attn)
    monkeypatch.setitem(sys.modules, "flash_attn", standins.flash_attn_module())
