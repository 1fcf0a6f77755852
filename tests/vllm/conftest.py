"""The engines that the tests with vLLM share: a start takes ten seconds of a core, so two do.

``engine`` computes, ``other`` continues: it has few blocks, so that it must preempt, and small
steps, so that it cuts prompts elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kvstore.conftest import start_service, stop
from tests.models import tiny_model
from tests.vllm.environment import WorkerEnvironment
from tests.vllm.rig import StoreProcess, VllmProcess

NAMESPACE = {"model": "tiny", "revision": "r", "numerics": "one machine"}
"""Given, so that the tests know the names of the blocks."""


@pytest.fixture(scope="session")
def vllm() -> WorkerEnvironment:
    environment = WorkerEnvironment()
    if not environment.installed:
        pytest.skip(environment.reason)
    return environment


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32 numbers: the fewest that vLLM's attention on a CPU has."""
    return tiny_model("qwen3", tmp_path_factory.mktemp("model") / "tiny", head_dim=32)


@pytest.fixture(scope="session")
def store(vllm: WorkerEnvironment) -> Iterator[StoreProcess]:
    process, url = start_service("--budget=256MiB", "--partial-life=120")
    yield StoreProcess(process, url)
    stop(process)


@pytest.fixture(scope="session")
def engine(
    tiny: Path, store: StoreProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmProcess]:
    log = tmp_path_factory.mktemp("engine") / "log"
    process = VllmProcess(tiny, store.url, log, extra={"namespace": NAMESPACE})
    yield process
    process.close()


@pytest.fixture(scope="session")
def other(
    tiny: Path, store: StoreProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmProcess]:
    process = VllmProcess(
        tiny,
        store.url,
        tmp_path_factory.mktemp("other") / "log",
        extra={"namespace": NAMESPACE},
        num_gpu_blocks_override=48,
        max_num_batched_tokens=72,
    )
    yield process
    process.close()
