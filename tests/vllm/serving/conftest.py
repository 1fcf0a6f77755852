"""One cluster of vLLM workers for all tests of the folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vllm.environment import WorkerEnvironment
from tests.vllm.serving.rig import VllmCluster, vllm_cluster


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter that has vLLM."""
    environment = WorkerEnvironment()
    if not environment.installed:
        pytest.skip(environment.reason)
    return environment.python


@pytest.fixture(scope="session")
def served(python: str) -> Iterator[VllmCluster]:
    """One prefill and two decode workers; every prompt is handed over."""
    with vllm_cluster(python) as cluster:
        yield cluster
