"""Tiny models, each written and loaded once for all tests of the torch side."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest

from kvrelay.engine.model.loading import LoadedModel, load_model
from tests.engine.torch.drive import Oracle
from tests.models import tiny_model

Pair = tuple[LoadedModel, Oracle]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """``pair(kind)``: the model loaded for serving and the plain one, float32, on the CPU."""

    @lru_cache
    def make(kind: str) -> Pair:
        path = tiny_model(kind, tmp_path_factory.mktemp("models") / kind)
        return load_model(path, "float32", "cpu"), Oracle(path)

    return make
