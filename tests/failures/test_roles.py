"""A worker changes its role under load: no client sees it, and the fleet keeps working."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvrelay.cli.dispatch import main
from kvrelay.errors import KvrelayError, Mismatch, Rejected
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from tests.exact.idle import check_idle
from tests.failures.rig import Rig, rig
from tests.failures.test_drain import Load

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]
ENOUGH_SECONDS = 60.0
PREFILL, DECODE = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE


@pytest.fixture(scope="module")
def fleet(model: Path) -> Iterator[Rig]:
    """One prefill and three decode workers."""
    with rig(model, prefill=1, decode=3) as made:
        yield made


async def _set_role(address: str, role: types_pb2.Role.ValueType) -> worker_pb2.WorkerInfo:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            answer = await stub.SetRole(worker_pb2.SetRoleRequest(role=role), timeout=60.0)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return answer.info


async def _more(load: Load, running: asyncio.Future[None], count: int) -> None:
    """Wait for ``count`` further streams."""
    wanted = len(load.done) + count
    async with asyncio.timeout(ENOUGH_SECONDS):
        while len(load.done) < wanted:
            assert not running.done(), running.exception()
            await asyncio.sleep(0.05)


async def _change(rig: Rig, load: Load) -> tuple[worker_pb2.WorkerInfo, int]:
    """Change the last decode worker to prefill. Returns the number of streams done before."""
    running = asyncio.ensure_future(load.run())
    address = rig.cluster.addresses("decode")[2]
    try:
        await _more(load, running, 6)
        info = await _set_role(address, PREFILL)
        changed = len(load.done)
        again = await _set_role(address, PREFILL)
        assert again.worker_id == info.worker_id  # nothing happens twice
        await _more(load, running, 20)
        load.stop = True
        await running
        return info, changed
    finally:
        load.stop = True
        running.cancel()


def test_a_decode_worker_becomes_a_prefill_worker(
    fleet: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    load = Load(fleet, random.randrange(1 << 32))
    info, changed = asyncio.run(_change(fleet, load))
    assert (info.role, info.started_as) == (PREFILL, DECODE)
    legs = [leg for s in load.done[changed:] if s.usage is not None for leg in s.usage.legs]
    mine = {leg.role for leg in legs if leg.worker_id == info.worker_id}
    assert mine == {"prefill"}, "it prefills, and does nothing else"
    load.check()
    check_idle(fleet.cluster)
    roles, states = _top(fleet, capsys)
    assert roles == ["decode"] * 2 + ["prefill"] * 2
    assert states == {"ready"}
    address = fleet.cluster.addresses("decode")[2]
    assert main(["role", "decode", "--worker", address]) == 0
    assert "decode worker" in capsys.readouterr().out


def _top(fleet: Rig, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], set[str]]:
    fleet.settle()
    capsys.readouterr()
    assert main(["top", "--once", "--json", "--router", fleet.cluster.router]) == 0
    workers = json.loads(capsys.readouterr().out)["workers"]
    return sorted(one["role"] for one in workers), {one["state"] for one in workers}


def test_what_is_refused(fleet: Rig) -> None:
    with pytest.raises(Rejected, match="role"):
        asyncio.run(_set_role(fleet.cluster.addresses("decode")[0], types_pb2.ROLE_UNSPECIFIED))
    error = asyncio.run(_leaving(fleet.cluster.addresses("decode")[1]))
    assert isinstance(error, Mismatch)
    assert error.field == "draining"


async def _leaving(address: str) -> KvrelayError:
    """The error of a worker that shuts down."""
    async with grpc.aio.insecure_channel(address) as channel:
        await worker_pb2_grpc.WorkerServiceStub(channel).Drain(
            worker_pb2.DrainRequest(), timeout=30.0
        )
    try:
        await _set_role(address, PREFILL)
    except KvrelayError as error:
        return error
    raise AssertionError("it changed its role")
