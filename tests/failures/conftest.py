"""One model and one cluster for all tests that kill: what dies is started again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.exact.oracle import Oracle
from tests.failures.rig import HELD, Rig, rig
from tests.models import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in float32 that does not end by itself."""
    return tiny_model("llama", tmp_path_factory.mktemp("llama") / "llama", eos_token_id=None)


@pytest.fixture(scope="session")
def oracle(model: Path) -> Oracle:
    """Plain transformers on the same weights."""
    return Oracle(model)


@pytest.fixture(scope="module")
def stand(model: Path) -> Iterator[Rig]:
    """A cluster of two prefill and two decode workers behind proxies."""
    with rig(model, module=HELD) as made:
        yield made
