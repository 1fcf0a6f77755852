"""``kvrelay role`` asks the router first: the last decode worker does not switch."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.cli.dispatch import main
from kvrelay.cluster.ports import free_ports
from kvrelay.rpc.deadline import Deadline
from router.workers.registry import Registry
from tests.router.fakes import FakeWorker, decode_worker, prefill_worker, running


def _used(registry: Registry) -> list[str]:
    return [worker.address for worker in registry.workers if worker.usable]


async def _role(role: str, worker: FakeWorker, *words: str) -> int:
    return await asyncio.to_thread(main, ["role", role, "--worker", worker.address, *words])


async def test_the_last_worker_that_decodes_stays(capsys: pytest.CaptureFixture[str]) -> None:
    workers = [prefill_worker(), decode_worker(), decode_worker("d1")]
    async with running(workers) as router:
        ask = ("--router", router.address)
        assert await _role("prefill", workers[1], *ask) == 0
        await workers[2].stop()
        registry = router.registry
        await registry.wait_for(lambda: len(_used(registry)) == 2, Deadline.after(20))
        assert await _role("prefill", workers[1], *ask) == 2
        told = capsys.readouterr().err
        assert f"role: {workers[1].address} is the only worker that the router at" in told
        assert "--force" in told
        assert await _role("prefill", workers[1], "--force") == 0
        assert await _role("decode", workers[0], *ask) == 0
        assert await _role("prefill", workers[0], *ask) == 0  # it does already


async def test_a_router_that_cannot_tell(capsys: pytest.CaptureFixture[str]) -> None:
    stranger = decode_worker("d9")
    await stranger.start()
    async with running([decode_worker()]) as router:
        assert await _role("prefill", stranger, "--router", router.address) == 2
        assert f"does not know {stranger.address}" in capsys.readouterr().err
        assert await asyncio.to_thread(main, ["role", "decode", "--worker", router.address]) == 1
        assert "is it the address of such a service" in capsys.readouterr().err
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    assert await _role("prefill", stranger, "--router", nobody) == 1
    assert f"cannot ask the router at {nobody}" in capsys.readouterr().err
    await stranger.stop()
