"""A store that stops, comes back and dies: requests are served, and their tokens are the same."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.processes import until
from tests.kvstore.conftest import start_service, stop
from tests.vllm.environment import WorkerEnvironment
from tests.vllm.rig import EngineError, Request, StoreProcess, VllmProcess, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def own(vllm: WorkerEnvironment) -> Iterator[StoreProcess]:
    process, url = start_service("--budget=64MiB")
    yield StoreProcess(process, url)
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        stop(process)


def test_a_store_that_stops_and_one_that_dies(
    tiny: Path, own: StoreProcess, tmp_path: Path
) -> None:
    engine = VllmProcess(tiny, own.url, tmp_path / "log")
    prompts = [prompt(500 + number, 120) for number in range(3)]
    wanted = [one.tokens for one in engine.generate(*[Request(one) for one in prompts])]
    engine.forget()

    own.process.send_signal(signal.SIGSTOP)
    found = engine.generate(*[Request(one) for one in prompts])
    assert [one.tokens for one in found] == wanted
    assert {one.account["external"] for one in found} == {0}
    assert {one.account["missed"] for one in found} == {"too_late"}
    own.process.send_signal(signal.SIGCONT)

    def loads_again() -> bool:
        engine.forget()
        (one,) = engine.generate(Request(prompts[0]))
        assert one.tokens == wanted[0]
        return one.account["external"] == 96

    until(loads_again, "the store is back, and its blocks are loaded", 60.0)

    own.process.kill()
    own.process.wait()
    engine.forget()
    found = engine.generate(*[Request(one) for one in prompts])
    assert [one.tokens for one in found] == wanted
    assert {one.account["external"] for one in found} == {0}
    engine.settle()
    engine.close()


def test_an_engine_that_cannot_be_carried_does_not_start(tiny: Path, tmp_path: Path) -> None:
    """With every reason at once, from vLLM's own configuration objects."""
    with pytest.raises(EngineError) as caught:
        VllmProcess(
            tiny,
            "memory://refused",
            tmp_path / "log",
            transfer={"kv_load_failure_policy": "fail", "kv_role": "kv_producer"},
            kv_cache_dtype="fp8",
        )
    said = str(caught.value) + (tmp_path / "log").read_text()
    assert "kv_role is 'kv_producer'" in said
    assert "kv_load_failure_policy is 'fail'" in said
    assert "a quantised KV cache" in said
