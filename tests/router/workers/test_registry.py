"""Which workers are used, and why others are not: namespace, role, restart, workers file."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from kvrelay.errors import Mismatch, Rejected
from kvrelay.rpc.deadline import Deadline
from kvrelay.v1 import router_pb2, router_pb2_grpc, types_pb2
from router.config import RouterConfig
from router.workers.registry import Registry
from router.workers.sources import read_workers_file
from router.workers.watch import FULL_CHECK_EVERY
from tests.router.fakes import (
    Running,
    answer,
    decode_worker,
    ids,
    model,
    namespace,
    prefill_worker,
    running,
)
from tests.router.rig import join, until


async def listed(router: Running) -> dict[str, router_pb2.WorkerStatus]:
    stub = router_pb2_grpc.RouterServiceStub(router.channel)
    answer = await stub.ListWorkers(router_pb2.ListWorkersRequest())
    return {status.address: status for status in answer.workers}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("revision", "s"),
        ("dtype", "bfloat16"),
        ("layout", "m"),
        ("block_size", 8),
        ("format_version", 2),
        ("digest", b"e" * 32),
        ("model", "other"),
    ],
)
async def test_another_namespace_is_refused(
    name: str, value: str | int | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    good, other = [prefill_worker(), decode_worker()], namespace()
    setattr(other, name, value)
    bad = decode_worker("d1", namespace=other)
    with caplog.at_level(logging.WARNING, "kvrelay.router"):
        async with running(good) as router:
            await join(router, *good, bad)
            await router.settled(used=2, listed=3)
            statuses = await listed(router)
    refused = statuses[bad.address]
    assert not refused.healthy
    assert f"namespace.{name}" in refused.reason
    assert f"namespace.{name}" in caplog.text
    assert refused.info.worker_id == "d1"
    assert all(statuses[worker.address].healthy for worker in good)
    assert all(statuses[worker.address].reason == "" for worker in good)
    await bad.stop()


async def test_a_wrong_role_is_refused() -> None:
    good, bad = decode_worker(), decode_worker("p0")
    async with running([good]) as router:
        await join(router, good, bad)
        await router.settled(used=2, listed=2)
        bad.role = types_pb2.ROLE_PREFILL
        await router.settled(used=1, listed=2)
        assert "is a prefill worker" in (await listed(router))[bad.address].reason
    await bad.stop()


async def test_a_restart_is_noticed() -> None:
    worker = decode_worker()
    async with running([worker]) as router:
        assert (await listed(router))[worker.address].info.worker_id == "d0"
        worker.boot = "another"
        known = router.registry.workers[0]
        router.registry.suspect(known, Rejected("x", "look again"))
        await router.settled(used=1)
        assert (await listed(router))[worker.address].info.worker_id == "another"
        assert router.registry.lost == {"decode": 1}


async def test_a_worker_that_goes_and_comes_back() -> None:
    stays, goes = decode_worker("d0"), decode_worker("d1")
    async with running([stays, goes]) as router:
        await goes.stop()
        await router.settled(used=1)
        assert not router.registry.lost, "it may have ended in order"
        request = router_pb2.GenerateRequest(max_tokens=3)
        request.token_ids.ids.append(9)
        request.sampling.seed = 1
        assert ids(await router.generate(request)) == answer([9], 3, 1)
        again = decode_worker("d2")
        await again.start(goes.address)
        await router.settled(used=2)
        await again.stop()


async def test_not_serving_is_respected() -> None:
    worker = decode_worker()
    async with running([worker], health_interval=0.02) as router:
        assert worker.server is not None
        (known,) = router.registry.workers
        await worker.server.health.set("kvrelay.v1.DecodeService", False)
        await router.settled(used=0)
        for _ in range(2 * FULL_CHECK_EVERY):
            before = known.answered_check
            await until(lambda before=before: known.answered_check > before)  # type: ignore[misc]
            assert not known.usable
        assert "NOT_SERVING" in (await listed(router))[worker.address].reason
        await worker.server.health.set("kvrelay.v1.DecodeService", True)
        await router.settled(used=1)
        assert not router.registry.lost


async def test_a_new_fleet_may_follow_the_old_one() -> None:
    first, second = decode_worker("d0"), decode_worker("d1", namespace=namespace(revision="s"))
    async with running([first, second], used=1) as router:
        used = next(worker for worker in router.registry.workers if worker.usable)
        leaving = first if used.address == first.address else second
        await leaving.stop()
        assert await router.registry.wait_for(
            lambda: any(w.usable and w is not used for w in router.registry.workers),
            Deadline.after(10),
        )


async def test_the_workers_file_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "workers.json"
    first, second = decode_worker("d0"), decode_worker("d1")
    addresses = [await worker.start() for worker in (first, second)]
    file.write_text(json.dumps({"decode": addresses[:1]}))
    async with running([], used=1, workers_file=str(file), decode=()) as router:
        file.write_text(json.dumps({"decode": addresses}))
        await router.settled(used=2)
        for wrong in ('["\\ud800:1"]', '["host"]', '[], "x": 1', ""):
            file.write_text(f'{{"decode": {wrong}}}')
            with pytest.raises(Rejected, match=r"workers_file|decode"):
                await router.registry._sources.read()
        await _told(caplog, "the workers listed before stay")
        await router.settled(used=2, listed=2)  # and the file is still read
        file.write_text(json.dumps({"decode": addresses[1:]}))
        await router.settled(used=1, listed=1)
        assert router.registry.workers[0].address == addresses[1]
    await first.stop()
    await second.stop()


async def _told(log: pytest.LogCaptureFixture, text: str) -> None:
    async with asyncio.timeout(10):
        while True:
            if text in log.text:
                return
            await asyncio.sleep(0.01)


def test_workers_files(tmp_path: Path) -> None:
    toml = tmp_path / "w.toml"
    toml.write_text('prefill = ["a:1"]\ndecode = ["b:2", "b:2"]\n')
    assert read_workers_file(toml).prefill == ("a:1",)
    assert read_workers_file(toml).decode == ("b:2",)
    for text in ("{", "[]", '{"decode": "b:2"}', '{"decode": [1]}', "[" * 100_000, " " * 2_000_000):
        file = tmp_path / "w.json"
        file.write_text(text)
        with pytest.raises(Rejected, match="workers_file"):
            read_workers_file(file)
    with pytest.raises(Rejected, match="workers_file"):
        read_workers_file(tmp_path / "none.json")


def test_a_router_without_workers_is_refused() -> None:
    with pytest.raises(Rejected, match="decode"):
        RouterConfig(model="m")


async def test_two_fleets_are_never_used_together() -> None:
    first, second = decode_worker("d0"), decode_worker("d1", namespace=namespace(revision="s"))
    addresses = tuple([await worker.start() for worker in (first, second)])
    registry = Registry(RouterConfig(model=str(model()), decode=addresses, health_interval=0.05))
    used: list[set[str]] = []
    registry.listen(lambda: used.append({w.key for w in registry.workers if w.usable}))
    await registry.start()  # both are checked at the same time

    def judged() -> bool:
        problems = [worker.problem for worker in registry.workers]
        return None in problems and any(isinstance(one, Mismatch) for one in problems)

    assert await registry.wait_for(judged, Deadline.after(10))
    await registry.close()
    await first.stop()
    await second.stop()
    assert max(map(len, used)) == 1, used


async def test_one_started_again_as_another_model_is_not_used_meanwhile() -> None:
    worker = decode_worker()
    async with running([worker]) as router:
        (known,) = router.registry.workers
        seen: set[str] = set()

        async def look() -> None:
            while not isinstance(known.problem, Mismatch):
                seen.update(
                    w.info.namespace.model
                    for w in router.registry.workers
                    if w.usable and w.info is not None
                )
                await asyncio.sleep(0)

        looking = asyncio.create_task(look())
        worker.boot = "d1"
        worker.namespace = namespace(model="another")
        await asyncio.wait_for(looking, 10)
        assert seen == {"tiny"}
