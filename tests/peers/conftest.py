"""The cluster that the foreign clients share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.peers.rig import Served, up


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with up(tmp_path_factory.mktemp("up")) as made:
        yield made
