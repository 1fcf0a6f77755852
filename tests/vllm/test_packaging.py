"""`pip install kvrelay[worker-vllm]` in vLLM's environment adds light packages and no others."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.vllm.environment import WorkerEnvironment

pytestmark = pytest.mark.vllm

LIGHT = {"grpcio-health-checking", "grpcio-reflection", "redis", "xxhash"}
PIP = {"pip"}  # that of the environment itself
MOST_BYTES = 10 << 20


def test_only_light_packages_are_added(vllm: WorkerEnvironment) -> None:
    found = {path.stem.rpartition("-")[0]: path for path in vllm.packages.glob("*.dist-info")}
    names = {re.sub(r"[-_.]+", "-", name).lower() for name in found}
    assert names - PIP <= LIGHT
    sizes = [
        path.stat().st_size
        for folder in vllm.packages.iterdir()
        if folder.name.partition("-")[0] not in PIP
        for path in folder.rglob("*")
        if path.is_file()
    ]
    assert sum(sizes) < MOST_BYTES


def test_connector_and_samplers_import_in_vllms_environment(vllm: WorkerEnvironment) -> None:
    code = (
        "from kvrelay.engine.vllm import connector, sampling, sampling_v2;"
        "classes = connector.KvrelayConnector, sampling.KvrelaySampling,"
        " sampling_v2.KvrelaySamplingV2;"
        "print(*[one.__abstractmethods__ for one in classes])"
    )
    done = subprocess.run(
        [vllm.python, "-c", code],
        cwd=vllm.root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "frozenset() frozenset() frozenset()"
